"""The monitor counts compilations, and after `serving` does what the variable says."""

from __future__ import annotations

import inspect
import logging
import threading
import types

import pytest

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from tokenspeed.kernels.triton import compile_monitor  # noqa: E402
from tokenspeed.kernels.triton.compile_monitor import CompiledWhileServing, CompileMonitor, KernelList, KernelOrder  # noqa: E402
from tokenspeed.protocol.errors import ConfigError  # noqa: E402


def compiled(name: str = "_gemv_kernel", seconds: float = 1.5, cache_hit: bool = False) -> None:
    """What Triton does at the end of a compilation."""
    triton.knobs.compilation.listener(
        src=types.SimpleNamespace(name=name),
        metadata={"name": name},
        metadata_group={},
        times=types.SimpleNamespace(total=int(seconds * 1e6)),
        cache_hit=cache_hit,
    )


@pytest.fixture
def monitor():
    made = []

    def install(mode: str = "off") -> CompileMonitor:
        made.append(CompileMonitor(mode))
        made[-1].install()
        return made[-1]

    yield install
    for each in reversed(made):
        each.remove()
    assert triton.knobs.compilation.listener is None


def test_totals(monitor):
    watching = monitor()
    compiled(seconds=1.5)
    compiled(seconds=0.5)
    compiled(cache_hit=True)
    assert watching.totals() == (2, 2.0)
    assert watching.num_loaded == 1


def test_the_listener_before_still_hears(monitor):
    first, second = monitor(), monitor("warn")
    compiled()
    assert first.num_compiled == second.num_compiled == 1


def test_what_the_start_compiled_by_itself_is_named(monitor, caplog):
    caplog.set_level(logging.INFO)
    watching = monitor()
    for name in ("_a", "_b", "_a"):
        compiled(name, seconds=0.5)
    compiled("_loaded", cache_hit=True)
    watching.serving()
    assert [record.getMessage() for record in caplog.records] == [
        "3 kernels were compiled here, in 1.5 s: _a x 2, _b x 1"
    ]
    caplog.clear()
    quiet = monitor()
    quiet.serving()
    assert not caplog.records


@pytest.mark.parametrize("cache_hit", [False, True])
def test_modes(monitor, caplog, cache_hit):
    caplog.set_level(logging.WARNING)
    warn = monitor("warn")
    compiled("early", cache_hit=cache_hit)
    assert not caplog.records
    warn.serving()
    compiled("late", cache_hit=cache_hit)
    assert "late was" in caplog.text and "while serving" in caplog.text
    strict = monitor("error")
    compiled("early", cache_hit=cache_hit)
    strict.serving()
    with pytest.raises(CompiledWhileServing, match="late was"):
        compiled("late", cache_hit=cache_hit)


def test_off_says_nothing(monitor, caplog):
    monitor("off").serving()
    compiled()
    assert not caplog.records


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"TOKENSPEED_JIT_COMPILE_CHECK is 'loud'.*off, warn, error"):
        CompileMonitor("loud")


def test_triton_really_calls_it(monitor):
    """The keyword arguments are Triton's own; a version that changes them must fail here, not in a server."""
    parameters = inspect.signature(triton.knobs.CompilationListener.__call__).parameters
    ours = inspect.signature(CompileMonitor._on_compile).parameters
    assert list(parameters) == list(ours)


def missing(name: str, key: str) -> bool:
    """What Triton does before a compilation; True = passed over."""
    kernel = types.SimpleNamespace(src="text", fn=missing)
    about = types.SimpleNamespace(module="m", name=name, jit_function=kernel)
    hook = triton.knobs.runtime.jit_cache_hook
    ordered = {"specialization_data": key}
    return hook(key=key, repr="", fn=about, compile=ordered, is_manual_warmup=False, already_compiled=False)


def test_each_missing_kernel_is_listed_once_and_not_compiled():
    noted = []
    with KernelList(noted.append):
        assert all([missing("a", "1"), missing("a", "2"), missing("b", "1"), missing("a", "1")])
        other = []
        thread = threading.Thread(target=lambda: other.append(missing("c", "1")))
        thread.start()
        thread.join()
        assert other == [False], "a kernel of somebody else's thread is compiled as always"
    assert noted == [KernelOrder("m", name, key, 4) for name, key in (("a", "1"), ("a", "2"), ("b", "1"))]
    assert triton.knobs.runtime.jit_cache_hook is None


def test_the_size_of_a_kernel_counts_what_it_calls(monkeypatch):
    """The kernel that takes longest, the drawing of a token, is short by itself."""
    helper = triton.JITFunction.__new__(triton.JITFunction)
    helper._src, helper.fn = "1234567", sized
    kernel = types.SimpleNamespace(src="123", fn=sized)
    monkeypatch.setitem(sized.__globals__, "missing", helper)  # which calls itself
    assert compile_monitor._source_size(kernel) == 10


def sized():
    return missing


def test_what_only_lists_launches_nothing(monkeypatch):
    """The router's kernel was passed over, and the experts ran on garbage for expert numbers: workers died of illegal
    addresses on the first GPU that met an expert model."""
    ran = []
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *args, grid, warmup, **options: ran.append((warmup, args, grid, options))
    )
    original = JITFunction.run
    kernel = triton.JITFunction.__new__(triton.JITFunction)
    with KernelList(lambda order: None):
        kernel[(3,)](1, 2, num_warps=4)
        thread = threading.Thread(target=lambda: kernel[(3,)](3))
        thread.start()
        thread.join()
    kernel[(3,)](1)
    assert ran == [(True, (1, 2), (3,), {"num_warps": 4}), (False, (3,), (3,), {}), (False, (1,), (3,), {})]
    assert JITFunction.run is original


def test_two_threads_list_one_after_the_other():
    """Regression: the one that left first put Triton's own launch back, and the other launched on garbage."""
    original = JITFunction.run
    is_first_in, may_go = threading.Event(), threading.Event()
    found = []

    def first():
        with KernelList(lambda order: None):
            is_first_in.set()
            may_go.wait()
        found.append("first left")

    def second():
        with KernelList(lambda order: None):
            found.append("second came")
            found.append(JITFunction.run is not original and triton.knobs.runtime.jit_cache_hook is not None)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    is_first_in.wait()
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive() and not found
    may_go.set()
    for thread in threads:
        thread.join()
    assert set(found) == {"first left", "second came", True}
    assert JITFunction.run is original and triton.knobs.runtime.jit_cache_hook is None


def test_triton_hands_the_list_what_it_expects():
    assert list(inspect.signature(JITFunction.run).parameters) == ["self", "args", "grid", "warmup", "kwargs"]

    parameters = inspect.signature(triton.knobs.JITHook.__call__).parameters
    assert list(parameters) == list(inspect.signature(KernelList._is_listed).parameters)
