"""`launch.QuickLaunch`: what it remembers is what Triton would have found, and everything unusual is left to Triton."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_device import DEVICE, ON_GPU
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.language import constexpr
from triton.runtime.jit import JITFunction, create_function_from_signature

from tokenspeed.kernels.triton import launch
from tokenspeed.kernels.triton.compile_monitor import KernelList
from tokenspeed.kernels.triton.launch import QuickLaunch, ceil_div, launch_notes, power_of_2


def kernel(a_ptr, count, scale, SIZE: constexpr):  # type: ignore[no-untyped-def]
    """Never compiled."""


class OnGpu(torch.Tensor):
    """Says that it is."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


class Counted(JITFunction):  # type: ignore[type-arg]
    """A kernel whose own launches only note their arguments, and whose variants note theirs.

    Fields:
        slow, quick: (grid, arguments) of each launch. used: of the quick ones, whose variant.
        is_missing: its variants are not there afterwards.
    """

    def __init__(self, do_not_specialize: list[str] | None = None) -> None:
        super().__init__(kernel, do_not_specialize=do_not_specialize)
        self.slow: list[Any] = []
        self.quick: list[Any] = []
        self.used: list[int] = []
        self.is_missing = False

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launched(*args: Any, **options: Any) -> Any:
            self.slow.append((grid, args, options))
            variant = SimpleNamespace(run=self._note, function=len(self.slow) - 1, packed_metadata="m")
            return None if self.is_missing else variant

        return launched

    def _note(self, x: int, y: int, z: int, stream: int, function: int, metadata: str, *rest: Any) -> None:
        assert (stream, metadata, rest[:3]) == (7, "m", (None, None, None))
        self.used.append(function)
        self.quick.append(((x, y, z), rest[3:]))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the launch asks Triton for."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 7)
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None, debug=False)
    made = SimpleNamespace(
        __version__="3.6.0",
        knobs=SimpleNamespace(runtime=runtime),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
    )
    monkeypatch.setattr(launch, "triton", made)
    yield made


A = on_gpu(torch.zeros(64, dtype=torch.bfloat16))
OPTIONS = {"SIZE": 64, "num_warps": 4}


def test_the_second_launch_is_quick(device: SimpleNamespace) -> None:
    counted = Counted()
    quick, other = QuickLaunch(counted), on_gpu(torch.ones(32, dtype=torch.bfloat16))
    quick[(3,)](A, 5, 0.5, **OPTIONS)
    quick[(4, 2)](other, 7, 0.25, **OPTIONS)
    assert counted.slow == [((3,), (A, 5, 0.5), OPTIONS)]
    assert counted.quick == [((4, 2, 1), (other.data_ptr(), 7, 0.25, 64))]


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((A[1:], 5, 0.5), id="an address that is not a multiple of 16"),
        pytest.param((A.float(), 5, 0.5), id="dtype"),
        pytest.param((None, 5, 0.5), id="no tensor"),
        pytest.param((A, 1, 0.5), id="one"),
        pytest.param((A, 16, 0.5), id="a multiple of 16"),
    ],
)
def test_another_variant_goes_triton_s_way_first(args: tuple[Any, ...], device: SimpleNamespace) -> None:
    counted = Counted()
    quick = QuickLaunch(counted)
    for given in ((A, 5, 0.5), args, args):
        quick[(1,)](*given, **OPTIONS)
    assert [len(counted.slow), len(counted.quick)] == [2, 1]
    quick[(1,)](*args, **(OPTIONS | {"SIZE": 32}))
    quick[(1,)](*args, **(OPTIONS | {"num_warps": 8}))
    assert [len(counted.slow), len(counted.quick)] == [4, 1]


def test_equal_values_of_other_types_are_other_variants(device: SimpleNamespace) -> None:
    counted = Counted()
    quick = QuickLaunch(counted)
    for size in (1, True, 1.0):
        quick[(1,)](A, 5, 0.5, SIZE=size)
    assert [len(counted.slow), len(counted.quick)] == [3, 0]


def test_another_device_is_another_variant(device: SimpleNamespace) -> None:
    """A kernel is loaded for the device that was current."""
    counted = Counted()
    quick, active = QuickLaunch(counted), device.runtime.driver.active
    for index in (0, 1, 0, 1):
        active.get_current_device = lambda index=index: index
        quick[(1,)](A, 5, 0.5, **OPTIONS)
    assert [len(counted.slow), counted.used] == [2, [0, 1]]


def test_a_number_that_is_no_part_of_the_variant(device: SimpleNamespace) -> None:
    counted = Counted(do_not_specialize=["count"])
    quick = QuickLaunch(counted)
    for count in (5, 1, 16):
        quick[(1,)](A, count, 0.5, **OPTIONS)
    assert [len(counted.slow), len(counted.quick)] == [1, 2]


def test_the_unusual_is_left_to_triton(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_quick(
        *args: Any, options: dict[str, Any], grid: Any = (1,), prepare: Callable[[Any], None] = lambda _: None
    ) -> int:
        counted = Counted()
        quick = QuickLaunch(counted)
        quick[(1,)](*args, **options)
        prepare(counted)
        quick[grid](*args, **options)
        assert len(counted.slow) + len(counted.quick) == 2
        return len(counted.quick)

    usual = (A, 5, 0.5)
    assert num_quick(*usual, options=OPTIONS) == 1
    assert num_quick(A, 2**31, 0.5, options=OPTIONS) == 0
    assert num_quick(A, True, 0.5, options=OPTIONS) == 0
    assert num_quick(object(), 5, 0.5, options=OPTIONS) == 0
    assert num_quick(torch.zeros(64), 5, 0.5, options=OPTIONS) == 0
    assert num_quick(*usual, options=OPTIONS | {"libraries": {}}) == 0
    assert num_quick(*usual, options=OPTIONS, grid=[1]) == 0
    assert num_quick(*usual, options=OPTIONS, grid=lambda given: (1,)) == 0
    assert num_quick(*usual, options=OPTIONS, prepare=lambda kernel: kernel.pre_run_hooks.append(print)) == 0
    assert num_quick(*usual, 64, options={}) == 0
    assert num_quick(A, 5, options=OPTIONS | {"scale": 0.5}) == 0
    runtime = device.knobs.runtime
    for name, unusual, usual_again in (
        ("launch_enter_hook", print, SimpleNamespace(calls=[])),
        ("launch_exit_hook", SimpleNamespace(calls=[print]), None),
        ("debug", True, False),
    ):
        assert num_quick(*usual, options=OPTIONS, prepare=lambda _: setattr(runtime, name, unusual)) == 0  # noqa: B023
        setattr(runtime, name, usual_again)
        assert num_quick(*usual, options=OPTIONS) == 1
    device.__version__ = "3.6.0+git1234"
    assert num_quick(*usual, options=OPTIONS) == 1
    device.__version__ = "3.7.0"
    assert num_quick(*usual, options=OPTIONS) == 0
    device.__version__ = "3.6.0"
    # A list of kernels is made: nothing may run.
    taken = lambda _: monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)  # noqa: E731
    assert num_quick(*usual, options=OPTIONS, prepare=taken) == 0


def test_what_triton_did_not_compile_is_not_remembered(device: SimpleNamespace) -> None:
    counted = Counted()
    counted.is_missing = True
    quick = QuickLaunch(counted)
    for _ in range(2):
        assert quick[(1,)](A, 5, 0.5, **OPTIONS) is None
    assert [len(counted.slow), len(counted.quick)] == [2, 0]


@pytest.mark.parametrize("kept", [[], ["count"]])
def test_kinds_are_at_least_as_fine_as_triton_s(kept: list[str], device: SimpleNamespace) -> None:
    """What is found for one launch is used for another only if Triton would use the same."""
    counted = Counted(do_not_specialize=kept)
    quick = QuickLaunch(counted)
    binder = create_function_from_signature(counted.signature, counted.params, make_backend(GPUTarget("cuda", 90, 32)))
    tensors = [A, A[1:], A[8:], A.float(), A.half(), on_gpu(torch.zeros(4, dtype=torch.int64)), None]
    numbers = [0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, -(2**31)]
    seen: list[Any] = []
    for a, count, scale in itertools.product(tensors, numbers, [0.0, 1.0, 0.5]):
        num_slow = len(counted.slow)
        quick[(1,)](a, count, scale, **OPTIONS)
        _, specialization, _ = binder(a, count, scale, **OPTIONS)
        if len(counted.slow) > num_slow:
            seen.append(specialization)
        else:
            assert seen[counted.used[-1]] == specialization
    assert len(counted.used) > len(seen) >= 6 * (1 if kept else 3)


def test_nothing_runs_while_kernels_are_listed(device: SimpleNamespace) -> None:
    counted = Counted()
    quick = QuickLaunch(counted)
    quick[(1,)](A, 5, 0.5, **OPTIONS)
    with KernelList(lambda order: None):
        quick[(1,)](A, 5, 0.5, **OPTIONS)
    assert [len(counted.slow), len(counted.quick)] == [2, 0]
    quick[(1,)](A, 5, 0.5, **OPTIONS)
    assert [len(counted.slow), len(counted.quick)] == [2, 1]


@triton.jit
def _scaled_kernel(a_ptr, b_ptr, out_ptr, count, scale, HAS_B: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a_ptr + where, mask=where < count, other=0.0).to(tl.float32) * scale
    if HAS_B:
        x += tl.load(b_ptr + where, mask=where < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, x.to(out_ptr.dtype.element_ty), mask=where < count)


def test_results_are_those_of_a_plain_launch() -> None:
    """Every variant twice, over other memory, numbers and grids; on a GPU the second time is a quick one."""
    quick = QuickLaunch(_scaled_kernel)
    for has_b, first, count, dtype in itertools.product(
        (False, True), (0, 1, 8), (1, 16, 17, 96), (torch.float32, torch.float16)
    ):
        for scale in (0.5, 3.0):
            a, b = (torch.randn(104, device=DEVICE).to(dtype)[first:] for _ in range(2))
            given = (a, b if has_b else None)
            out, expected = torch.full((2, 128), torch.nan, device=DEVICE)
            rest = {"HAS_B": has_b, "BLOCK": 32, "num_warps": 1}
            quick[(ceil_div(count, 32),)](*given, out, count, scale, **rest)
            _scaled_kernel[(ceil_div(count, 32),)](*given, expected, count, scale, **rest)
            assert torch.equal(out[:count], expected[:count]) and out[count:].isnan().all()
    if quick._is_compiled:
        assert len(quick._known) == 24  # by addends, alignment, 1 or 16 n or neither, dtype


@pytest.mark.skipif(not ON_GPU, reason="graphs are the GPU's")
def test_graphs_record_quick_launches() -> None:
    quick = QuickLaunch(_scaled_kernel)
    a, out = torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)

    def launched() -> None:
        quick[(2,)](a, None, out, 64, 2.0, HAS_B=False, BLOCK=32, num_warps=1)
        quick[(2,)](out, a, out, 64, 3.0, HAS_B=True, BLOCK=32, num_warps=1)

    launched()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched()
    a.fill_(5.0)
    out.zero_()
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 35.0))


def test_a_start_says_why_launches_are_triton_s(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_RUN", JITFunction.run)
    assert launch_notes() == []
    device.__version__ = "3.7.1+cu130"
    assert launch_notes() == ["launches: by Triton (quick launches know 3.6.0, this is 3.7.1)"]
    counted = Counted()
    quick = QuickLaunch(counted)
    for _ in range(2):
        quick[(1,)](A, 5, 0.5, **OPTIONS)
    assert [len(counted.slow), len(counted.quick)] == [2, 0]
    device.__version__ = "3.6.0"
    monkeypatch.setattr(launch, "_RUN", None)
    assert launch_notes() == ["launches: by Triton (Triton's own launch was replaced)"]
    monkeypatch.setattr(launch.torch.version, "hip", "6.4")
    assert launch_notes() == ["launches: by Triton (quick launches are for NVIDIA GPUs)"]


def test_arithmetic_of_the_host() -> None:
    assert [ceil_div(a, 8) for a in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert [power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


COMPILE_TIME = ("cdiv", "next_power_of_2")


def test_the_host_calls_no_function_of_the_compiler() -> None:
    """`triton.cdiv` and `triton.next_power_of_2` take the host microseconds each; kernels may, and compile them."""
    found = []
    for file in sorted(Path(launch.__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        kernels = [node for node in functions if any("jit" in ast.unparse(item) for item in node.decorator_list)]
        inside = {call for kernel in kernels for call in ast.walk(kernel)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in COMPILE_TIME and node not in inside:
                found.append(f"{file.name}:{node.lineno} {ast.unparse(node)}")
    assert not found
