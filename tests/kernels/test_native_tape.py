"""The tape: a replay equals the eager native step bit for bit, whatever changed on the recorded addresses."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from native_support import BF16, HAS_COMPILER, context, paged_batch, random_blocks

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.cpu.native.context import MAX_LINEAR_ROWS, NativeBlockLinear, NativeContext
from tokenspeed.kernels.ops import GraphUnsupported

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 6, 2, 64, 128, 100


class TinyModel:
    """Two layers of a decoder, out of native operations and views only."""

    def __init__(self, native: NativeContext, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.native = native
        self.block_linear = NativeBlockLinear(native)
        self.table = torch.randn(VOCABULARY, HIDDEN).to(BF16)
        self.norm = torch.rand(HIDDEN).to(BF16)
        self.cos_sin = torch.randn(2048, HEAD_DIM)
        width = HEADS * HEAD_DIM
        self.qkv = self.pack(width + 2 * KV_HEADS * HEAD_DIM, HIDDEN)
        self.out, self.gate_up, self.down = self.pack(HIDDEN, width), self.pack(256, HIDDEN), self.pack(HIDDEN, 128)
        self.head, self.square = self.pack(HIDDEN, HIDDEN), torch.randn(HIDDEN, HIDDEN).to(BF16)
        self.keys, self.values = [keys.clone(), keys.clone()], [values.clone(), values.clone()]

    def pack(self, out_features: int, in_features: int) -> object:
        return self.block_linear.pack(random_blocks("Q4_1", out_features, in_features), "Q4_1", in_features)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        n = self.native
        residual = n.embedding(ids, self.table)
        y = n.rms_norm(residual, self.norm, 1e-5)
        for keys, values in zip(self.keys, self.values, strict=True):
            qkv = self.block_linear(y, self.qkv, None)
            q = n.qkv_rope_cache(qkv, positions, self.cos_sin, keys, values, batch.slots, None, None, 1e-5)
            attended = n.paged_attention(q, keys, values, batch, 0.125, None)
            y = n.add_rms_norm(self.block_linear(attended, self.out, None), residual, self.norm, 1e-5)
            y = self.block_linear(n.silu_and_mul(self.block_linear(y, self.gate_up, None)), self.down, None)
            y = n.add_rms_norm(y, residual, self.norm, 1e-5)
        head = self.block_linear(y, self.head, None)
        if len(ids) > MAX_LINEAR_ROWS:
            return head
        return n.add_rms_norm(n.linear(y.view(-1, HIDDEN), self.square, None), head, self.norm, 1e-5)


def random_inputs(rows: int, batch: AttentionBatch, longest: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """New ids, and shorter contexts written in place into the batch."""
    lens = torch.tensor([int(torch.randint(1, n + 1, ())) for n in longest], dtype=torch.int32)
    batch.seq_lens.copy_(lens)
    positions = lens.long() - 1
    page = batch.page_table.gather(1, (positions // 16)[:, None])[:, 0].long()
    batch.slots.copy_(page * 16 + positions % 16)
    return torch.randint(0, VOCABULARY, (rows,)), positions


@pytest.mark.parametrize("num_threads", (1, 2, 4))
@pytest.mark.parametrize("rows", (1, 3, 8, 17))
def test_replays_equal_eager_steps(rows: int, num_threads: int) -> None:
    longest = [int(torch.randint(1, 900, ())) for _ in range(rows)]
    keys, values, batch = paged_batch([1] * rows, longest, 16, KV_HEADS, HEAD_DIM)
    model = TinyModel(context("tuned", num_threads), keys, values)
    ids, positions = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    with model.native.recorder.record() as tape:
        recorded = model(ids, positions, batch)
    gc.collect()
    for _ in range(3):
        new_ids, new_positions = random_inputs(rows, batch, longest)
        expected_keys = [k.clone() for k in model.keys]
        model.native.library.run(b"", 0)  # an empty list is a run like another
        recorded.fill_(float("nan"))
        ids.copy_(new_ids)
        positions.copy_(new_positions)
        tape.replay()
        replayed, written = recorded.clone(), [k.clone() for k in model.keys]
        for now, before in zip(model.keys, expected_keys, strict=True):
            now.copy_(before)
        eager = model(new_ids, new_positions, batch)
        assert torch.equal(replayed, eager)
        assert not replayed.isnan().any()
        for now, before in zip(model.keys, written, strict=True):
            assert torch.equal(now.view(torch.int16), before.view(torch.int16))


def test_two_tapes_and_eager_calls_do_not_disturb_each_other() -> None:
    keys, values, batch = paged_batch([1] * 4, [30, 60, 90, 120], 16, KV_HEADS, HEAD_DIM)
    model = TinyModel(context("tuned"), keys, values)
    first = (torch.tensor([1, 2, 3, 4]), torch.tensor([29, 59, 89, 119]))
    second = (torch.tensor([9, 8, 7, 6]), torch.tensor([29, 59, 89, 119]))
    with model.native.recorder.record() as tape_1:
        out_1 = model(*first, batch)
    with model.native.recorder.record() as tape_2:
        out_2 = model(*second, batch)
    expected_1 = model(*first, batch)
    tape_2.replay()
    tape_1.replay()
    expected_2 = model(*second, batch)
    assert torch.equal(out_1, expected_1)
    assert torch.equal(out_2, expected_2)
    assert not torch.equal(out_1, out_2)


def test_windows_and_sinks_are_recorded() -> None:
    """The sinks stay alive with the tape, and the window moves with the lengths."""
    native = context("tuned")
    keys, values, batch = paged_batch([1, 1], [300, 200], 16, KV_HEADS, HEAD_DIM)
    q, sinks = torch.randn(2, HEADS, HEAD_DIM).to(BF16), torch.randn(HEADS)
    with native.recorder.record() as tape:
        out = native.paged_attention(q, keys, values, batch, 0.125, 20, 1.0, sinks)
    for lens in ([300, 200], [33, 5]):
        batch.seq_lens.copy_(torch.tensor(lens))
        tape.replay()
        assert torch.equal(out, native.paged_attention(q, keys, values, batch, 0.125, 20, 1.0, sinks))
    assert not torch.equal(out, native.paged_attention(q, keys, values, batch, 0.125, None, 1.0, None))


def test_threads_may_run_and_record_at_once() -> None:
    """Recording concerns its own thread; runs take turns."""
    native = context("tuned")
    x = torch.randn(4, 64).to(BF16)
    weight = torch.rand(64).to(BF16)
    expected = native.rms_norm(x, weight, 1e-5)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            if number == 0:
                with native.recorder.record() as tape:
                    out = native.rms_norm(x, weight, 1e-5)
                tape.replay()
            else:
                out = native.rms_norm(x, weight, 1e-5)
            if not torch.equal(out, expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_inputs_live_as_long_as_the_tape() -> None:
    native = context("tuned")
    x = torch.randn(2, 64).to(BF16)
    with native.recorder.record() as tape:
        weight = _ones_made_outside()
        out = native.rms_norm(x, weight, 1e-5)
        del weight
    gc.collect()
    junk = [torch.full((64,), 5.0, dtype=BF16) for _ in range(100)]
    tape.replay()
    assert torch.equal(out, native.rms_norm(x, torch.ones(64, dtype=BF16), 1e-5))
    del junk


def _ones_made_outside() -> torch.Tensor:
    """A weight made by another thread: this one's recording does not see its operations."""
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(64, dtype=BF16)))
    thread.start()
    thread.join()
    return made[0]


def test_memory_of_dead_results_is_reused_and_of_living_ones_is_not() -> None:
    native = context("tuned")
    x, weight = torch.randn(2, 64).to(BF16), torch.rand(64).to(BF16)
    with native.recorder.record() as tape:
        kept = native.rms_norm(x, weight, 1e-5)
        half = native.rms_norm(kept, weight, 1e-5)[1:]
        addresses = set()
        y = kept
        for _ in range(20):
            y = native.rms_norm(y, weight, 1e-5)
            addresses.add(y.data_ptr())
    assert len(addresses) <= 3
    assert kept.data_ptr() not in addresses and half.data_ptr() - 128 not in addresses
    tape.replay()
    assert torch.equal(kept, native.rms_norm(x, weight, 1e-5))
    assert torch.equal(half, native.rms_norm(kept, weight, 1e-5)[1:])


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    native = context("tuned")
    x, weight = torch.randn(2, 64).to(BF16), torch.rand(64).to(BF16)
    with pytest.raises(GraphUnsupported, match="aten::mul"), native.recorder.record():
        native.rms_norm(x, weight, 1e-5) * 2
    with pytest.raises(GraphUnsupported, match=r"rms_norm takes contiguous bfloat16; got \(2, 64\) torch.float32"):
        single = x.float()
        with native.recorder.record():
            native.rms_norm(single, weight, 1e-5)
    many = torch.randn(MAX_LINEAR_ROWS + 1, 64).to(BF16)
    with (
        pytest.raises(GraphUnsupported, match=f"linear takes .* up to {MAX_LINEAR_ROWS} rows"),
        native.recorder.record(),
    ):
        native.linear(many, many, None)
    with pytest.raises(GraphUnsupported, match="recording already"), native.recorder.record(), native.recorder.record():
        pass
    with native.recorder.record() as tape:
        out = native.rms_norm(x, weight, 1e-5)
    tape.replay()
    assert torch.equal(out, native.rms_norm(x, weight, 1e-5)), "a failed recording must leave the context usable"
