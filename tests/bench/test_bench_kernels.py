"""`tokenspeed bench kernels`: cases for every operation, what they count, and a run at a tiny shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tiny_model import write_config
from waits import WaitsForTheDevice

from tokenspeed.bench import device, kernel_setting, kernels
from tokenspeed.bench.kernel_cases import cases
from tokenspeed.bench.kernel_sampling import SAMPLERS, SAMPLING
from tokenspeed.bench.kernel_setting import NotTimed, Setting
from tokenspeed.checkpoint.local import local_checkpoint
from tokenspeed.config.model import read_model_config
from tokenspeed.config.resolve import _USUAL
from tokenspeed.kernels.registry import REQUIRED, Implementation, Need, discover
from tokenspeed.protocol.errors import ConfigError


@pytest.fixture
def setting(tmp_path, monkeypatch) -> Setting:
    monkeypatch.setattr(kernel_setting, "CACHE_BYTES", 2**12)
    config = read_model_config(local_checkpoint("tiny", write_config(tmp_path), "dummy"))
    return Setting(config, torch.device("cpu"), torch.float32, (1, 3), (20,), context_len=33, page_size=16)


@pytest.mark.parametrize("op", REQUIRED)
def test_every_required_operation_runs_on_the_reference(setting, op):
    need = Need(setting.device, setting.dtype)
    (reference,) = [found for found in discover() if found.op == op and found.name == "reference"]
    found = cases(setting, op)
    assert found, f"declare shapes of {op} in bench/kernel_cases.py"
    assert {case.rows for case in found} == {1, 3, 20}
    with torch.inference_mode():
        for case in found:
            assert case.num_bytes > 0
            for call in case.make(reference.make(need)):
                out = call()
                assert isinstance(out, torch.Tensor) and out.shape[0] == case.rows and bool(out.isfinite().all())


def case_of(setting: Setting, op: str, rows: int, start: str = "") -> kernel_setting.Case:
    found = [case for case in cases(setting, op) or [] if case.rows == rows and case.shape.startswith(start)]
    assert len(found) == 1
    return found[0]


def test_counts_by_hand(setting):
    """Heads 4/2 of 16, hidden 64, inner 96, vocabulary 320, float32."""
    qkv = case_of(setting, "linear", 3, "qkv")
    assert (qkv.num_bytes, qkv.flop) == (4 * (64 * 128 + 3 * (64 + 128)), 2 * 3 * 64 * 128)
    decode = case_of(setting, "paged_attention", 3)
    assert decode.num_bytes == 4 * 16 * (2 * 3 * 33 * 2 + 2 * 3 * 4)
    assert decode.flop == 4 * 3 * 33 * 4 * 16
    prompt = case_of(setting, "paged_attention", 20, "4/2 heads of 16, one prompt")
    assert prompt.flop == 4 * (20 * 21 // 2) * 4 * 16
    assert case_of(setting, "silu_and_mul", 1).num_bytes == 4 * 3 * 96
    assert not [case for case in cases(setting, "linear") or [] if case.rows == 20 and case.shape.startswith("head")]


def test_attention_steps_by_hand(setting):
    """A chunk of 20 after 33, and a prompt of 4 beside 16 requests of 33; a key and a value are 2 * 2 * 16 numbers."""
    chunk = case_of(setting, "paged_attention", 20, "4/2 heads of 16, a chunk after 33")
    assert chunk.num_bytes == 4 * (53 * 64 + 2 * 20 * 64)
    assert chunk.flop == 4 * sum(range(34, 54)) * 64
    mixed = case_of(setting, "paged_attention", 20, "4/2 heads of 16, a prompt beside 16 decodes of 33")
    assert mixed.num_bytes == 4 * ((16 * 33 + 4) * 64 + 2 * 20 * 64)
    assert mixed.flop == 4 * (16 * 33 + 1 + 2 + 3 + 4) * 64
    small = replace(setting, prefill_lens=(16,))
    assert not [case for case in cases(small, "paged_attention") or [] if "beside" in case.shape]


def test_windows_and_sinks_are_those_of_the_model(setting):
    config = msgspec.structs.replace(setting.config, layer_windows=(8, None, 8), attention_sinks=True)
    sparse = replace(setting, config=config)
    wide, narrow = sorted(
        (case for case in cases(sparse, "paged_attention") or [] if case.rows == 3), key=lambda case: case.num_bytes
    )[::-1]
    assert wide.shape.endswith("context 33, sinks") and narrow.shape.endswith("context 33, window 8, sinks")
    assert narrow.num_bytes == 4 * (3 * 8 * 64 + 2 * 3 * 64) and narrow.flop == 4 * 3 * 8 * 64
    chunk = case_of(sparse, "paged_attention", 20, "4/2 heads of 16, a chunk after 33, window 8")
    assert chunk.num_bytes == 4 * (27 * 64 + 2 * 20 * 64) and chunk.flop == 4 * 20 * 8 * 64
    prompt = case_of(sparse, "paged_attention", 20, "4/2 heads of 16, one prompt, window 8")
    assert prompt.flop == 4 * (sum(range(1, 9)) + 12 * 8) * 64
    (reference,) = [found for found in discover() if found.op == "paged_attention" and found.name == "reference"]
    calls: list[tuple[int | None, torch.Tensor]] = []

    def attend(q, keys, values, batch, scale, window, out_scale, sinks):
        calls.append((window, sinks))
        return reference.make(None)(q, keys, values, batch, scale, window, out_scale, sinks)

    for case in (wide, narrow):
        assert bool(case.make(attend)[0]().isfinite().all())
    assert [window for window, _ in calls] == [None, 8] and all(sinks.shape == (4,) for _, sinks in calls)


@pytest.mark.parametrize("op", ["paged_attention", "qkv_rope_cache"])
def test_an_8_bit_cache_has_fewer_bytes_and_runs(setting, op):
    small = replace(setting, kv_dtype=torch.float8_e4m3fn)
    for plain, case in zip(cases(setting, op) or [], cases(small, op) or [], strict=True):
        assert case.num_bytes < plain.num_bytes and case.shape.endswith(", float8_e4m3fn cache")
    need = Need(setting.device, setting.dtype, small.kv_dtype)
    for found in discover():
        if found.op == op and found.why_not(need) is None:
            assert bool(case_of(small, op, 1).make(found.make(need))[0]().isfinite().all())


def test_e4m3_linears_have_scales_by_row_and_by_block(setting):
    given: list[tuple[int, ...]] = []

    class Kept:
        def why_not(self, in_features: int, out_features: int, is_block: bool) -> str | None:
            return "too narrow for blocks" if is_block and in_features == 64 else None

        def __call__(self, x, weight, scale):
            given.append(tuple(scale.shape))

    with pytest.raises(NotTimed, match="too narrow"):
        case_of(setting, "fp8_linear", 3, "qkv 64 -> 128 (scales by block)").make(Kept())
    case_of(setting, "fp8_linear", 3, "qkv 64 -> 128 (scales by row)").make(Kept())[0]()
    block = case_of(setting, "fp8_linear", 3, "down 96 -> 64 (scales by block)")
    block.make(Kept())[0]()
    assert given == [(128,), (1, 1)]
    assert block.num_bytes == 96 * 64 + 4 + 3 * (96 + 64) * 4


def test_sampling_is_timed_greedy_and_filtered(setting):
    """By a CPU's own sampler; the reference, which is not timed, takes the same arguments."""
    need = Need(setting.device, setting.dtype)
    able = [found for found in (*discover(), *SAMPLERS) if found.op == SAMPLING and found.why_not(need) is None]
    assert [found.name for found in able] == ["reference", "torch_cpu"]
    assert SAMPLERS[0].why_not(Need(torch.device("cuda"), torch.bfloat16)) is not None
    found = [case for case in cases(setting, SAMPLING) or [] if case.rows == 3]
    assert [case.shape for case in found] == [
        "320, greedy", "320, no filter", "320, top_k 20, top_p 0.95", "320, top_p 0.95"
    ]  # fmt: skip
    for case in found:
        assert case.num_bytes == 3 * 320 * 4
        assert len(case.make(able[0].make(need))) == 1 < len(setting.copies(case.num_bytes))
        drawn = {call().shape for one in able for call in case.make(one.make(need))}
        assert drawn == {(3,)}
    assert not [case for case in cases(setting, SAMPLING) or [] if case.rows == 20]


def test_pages_are_those_of_engines():
    assert {kind: usual.page_tokens for kind, usual in _USUAL.items()} == kernels.PAGE_TOKENS


def test_calls_use_more_memory_than_the_caches(setting):
    case = case_of(setting, "linear", 1, "o ")  # 16 KiB of weights, above the patched 4 KiB
    assert len(case.make(torch.add)) == 1
    case = case_of(setting, "rms_norm", 1)  # 768 bytes
    assert len(case.make(torch.add)) == -(-(2**12) // 768)


def test_the_fp8_rate_is_measured_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(device, "CPU_READ_BYTES", 2**20)
    monkeypatch.setattr(device, "CPU_MATMUL_SIZE", 64)
    cpu = torch.device("cpu")
    assert (device.measure_ceilings(cpu, torch.float32, "x", with_fp8=True).fp8_flop_per_s or 0) > 0
    assert device.measure_ceilings(cpu, torch.float32, "x").fp8_flop_per_s is None


def test_an_unknown_operation_has_no_cases(setting):
    assert cases(setting, "recorder") is None


def test_few_row_kernels_say_what_they_do_not_take(setting):
    class Few:
        max_rows = 2
        qtypes = frozenset({"Q4_0"})

        def why_not(self, in_features: int) -> str | None:
            return "odd" if in_features == 96 else None

    with pytest.raises(NotTimed, match="takes at most 2 rows"):
        case_of(setting, "fused_linear", 3, "qkv").make(Few())
    with pytest.raises(NotTimed, match="odd"):
        case_of(setting, "fused_linear", 1, "down").make(Few())
    with pytest.raises(NotTimed, match="does not take Q8_0"):
        case_of(setting, "block_linear", 1, "Q8_0 qkv").make(Few())


@pytest.mark.parametrize("op", [*REQUIRED, SAMPLING])
def test_references_say_whether_a_graph_could_hold_them(setting, op):
    need = Need(setting.device, setting.dtype)
    (reference,) = [found for found in discover() if found.op == op and found.name == "reference"]
    call, *_ = case_of(setting, op, 3, {"linear": "qkv", SAMPLING: "320, greedy"}.get(op, "")).make(
        reference.make(need)
    )
    with torch.inference_mode(), WaitsForTheDevice() as watched:
        call()
    assert watched.waits is not reference.can_record


class Recordings:
    """Makes recorders; as with graphs of one memory pool, one takes no second graph when the first is gone."""

    def __init__(self) -> None:
        self.num_recorders = self.num_replays = self.num_tries = 0
        self.is_capturing = False

    def make(self, need: Need) -> SimpleNamespace:
        self.num_recorders += 1
        is_spoilt = False

        @contextmanager
        def record() -> Iterator[SimpleNamespace]:
            nonlocal is_spoilt
            self.num_tries += 1
            if is_spoilt:
                raise RuntimeError("the pool is in use")
            is_spoilt, self.is_capturing = True, True
            try:
                yield SimpleNamespace(replay=self._replay)
            finally:
                self.is_capturing = False

        return SimpleNamespace(record=record)

    def _replay(self) -> None:
        self.num_replays += 1

    def ask(self) -> None:
        if self.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_capture_spoils_no_later_one(monkeypatch):
    made = Recordings()
    recorder = Implementation("recorder", "fake", 0, lambda need: None, made.make)
    monkeypatch.setattr(kernels, "discover", lambda: [recorder])
    monkeypatch.setattr(kernels.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernels.torch.cuda, "current_device", lambda: 0)
    random = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    monkeypatch.setattr(kernels.torch.cuda, "default_generators", (random,))
    monkeypatch.setattr(kernels, "best_s", lambda once, device, repeats: once() or 1.0)
    timer = kernels.Timer(Need(torch.device("cuda"), torch.bfloat16), 1)
    assert timer.time_s([lambda: None])[1] == "graph"
    assert timer.time_s([made.ask])[1] == "eager"
    assert timer.time_s([lambda: None])[1] == "graph"
    assert (made.num_recorders, made.num_replays, made.num_tries) == (3, 2, 3)  # one is not used again
    assert timer.time_s([made.ask], can_record=False)[1] == "eager"
    assert (made.num_recorders, made.num_tries) == (3, 3)


def test_a_run_ends_in_one_line_of_json(tmp_path, capsys, monkeypatch, setting):
    monkeypatch.setattr(device, "CPU_READ_BYTES", 2**20)
    monkeypatch.setattr(device, "CPU_MATMUL_SIZE", 64)
    argv = ["--model-config", str(write_config(tmp_path)), "--rows", "1", "--prefill", "none", "--context", "16",
            "--repeats", "1", "--num-threads", "1", "--dtype", "float32", "--device", "cpu",
            "--kv-cache-dtype", "fp8", "--ops", "rms_norm,linear,block_linear,paged_attention,sample_rows"]  # fmt: skip
    assert kernels.run(argv) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    rows = found["rows"]
    assert {row["op"] for row in rows} >= {"rms_norm", "linear", "paged_attention", "sample_rows"}
    assert (found["kv_cache_dtype"], found["page_size"]) == ("float8_e4m3fn", 16)
    assert "reference" in {row["implementation"] for row in rows}
    for op in ("rms_norm", "linear"):
        shapes = {row["shape"] for row in rows if row["op"] == op}
        assert sum(row["is_chosen"] for row in rows if row["op"] == op) == len(shapes)
    for row in rows:
        assert row["method"] == "cpu"
        assert row["of_bound"] == pytest.approx(row["bound_us"] / row["time_us"])
        assert row["gb_per_s"] > 0
    drawn = [(row["implementation"], row["is_chosen"]) for row in rows if row["op"] == "sample_rows"]
    assert drawn == [("torch_cpu", True)] * 4
    assert "sample_rows reference: it exists for comparison, no engine draws by it" in found["not_timed"]
    assert any(line.startswith("rms_norm triton: ") for line in found["not_timed"])
    assert any("not timed: " in line for line in shown)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ops", "rms_norm,nope"], "--ops has 'nope', the operations are: "),
        (["--dtype", "int8"], "--dtype is 'int8'"),
        (["--rows", "0"], "--rows"),
        (["--context", "0"], "--context is 0"),
        (["--time-limit", "0"], "--time-limit is 0"),
        (["--tune", "--device", "cpu"], "--tune measures kernels of a GPU"),
        (["--table", "x.json"], "--table is the file that --tune writes"),
        (["--tune", "--ops", "experts"], "--ops has no effect on --tune"),
        (["--tune", "--repeats", "3"], "--repeats has no effect on --tune"),
        (["--tune", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype has no effect on --tune"),
        (["--page-size", "0"], "--page-size is 0"),
        (["--nope"], "unknown flag --nope"),
    ],
)
def test_what_cannot_be_is_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        kernels.run(argv)
