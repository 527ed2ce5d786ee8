"""The ring between files and a device: right bytes in any order, bounded host memory, errors that name the tensor.

The "device" is the CPU: what is special about a GPU is one asynchronous copy, whose end the test decides.
"""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.checkpoint.safetensors_file import read_safetensors
from tokenspeed.loader import weight_stream
from tokenspeed.loader.weight_stream import Span, WeightStream
from tokenspeed.loader.weights import DummyWeight, SafetensorsWeight
from tokenspeed.protocol.errors import CheckpointError

CPU = torch.device("cpu")
CONTENT = bytes(random.Random(5).randbytes(10_000))


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(CONTENT)
    return str(file)


def spans(path: str, *sizes: int) -> list[Span]:
    made, offset = [], 7
    for size in sizes:
        made.append(Span(path, offset, size, f"tensor {len(made)}"))
        offset += size
    return made


def expected(span: Span) -> bytes:
    return CONTENT[span.offset : span.offset + span.nbytes]


def taken(stream: WeightStream, span: Span) -> bytes:
    return stream.take(span, CPU).numpy().tobytes()


@pytest.mark.parametrize("buffer_bytes", [1, 64, 100, 10_000])
@pytest.mark.parametrize("num_buffers", [1, 2, 5])
def test_every_byte_arrives(path, buffer_bytes, num_buffers):
    if buffer_bytes == 1:
        plan = spans(path, 3, 0, 1, 20)
    else:
        plan = spans(path, 1, 64, 0, 999, 65, 4000, 7)
    with closing(WeightStream(plan, buffer_bytes=buffer_bytes, num_buffers=num_buffers, num_threads=2)) as stream:
        for span in plan:
            assert taken(stream, span) == expected(span)


def test_spans_may_be_passed_over_taken_again_and_unknown(path):
    plan = spans(path, *[300] * 12)
    stranger = Span(path, 1, 50, "stranger")
    with closing(WeightStream(plan, buffer_bytes=128, num_buffers=3)) as stream:
        for span in (plan[2], plan[0], plan[2], stranger, plan[9], plan[8], plan[11]):
            assert taken(stream, span) == expected(span)


def test_random_orders(path):
    chance = random.Random(11)
    for _ in range(30):
        plan = spans(path, *[chance.randrange(0, 700) for _ in range(12)])
        with closing(WeightStream(plan, buffer_bytes=chance.randrange(16, 300), num_buffers=4)) as stream:
            for span in chance.choices(plan, k=20):
                assert taken(stream, span) == expected(span)


def test_the_ring_bounds_host_memory_and_reading_is_sequential(path, monkeypatch):
    """One thread, so that the order of reads is that of their submission."""
    made, offsets = [], []
    real_read = weight_stream.read_into
    monkeypatch.setattr(
        weight_stream,
        "staging_buffer",
        lambda nbytes, device: made.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8),
    )

    def read(out, path, offset, where):
        offsets.append(offset)
        real_read(out, path, offset, where)

    monkeypatch.setattr(weight_stream, "read_into", read)
    plan = spans(path, *[500] * 15)
    with closing(WeightStream(plan, buffer_bytes=200, num_buffers=4, num_threads=1)) as stream:
        for span in plan:
            taken(stream, span)
    assert made == [200] * 4
    assert offsets == sorted(offsets) and len(offsets) == 15 * 3


def test_a_buffer_is_not_used_again_before_its_copy_is_over(path, monkeypatch):
    """Copies that happen only when they are waited for: an early reuse would bring the wrong bytes."""
    pending = []

    def upload(source, out):
        pending.append(lambda: out.copy_(source))
        mine = pending[-1]

        def wait() -> None:
            if mine in pending:
                pending.remove(mine)
                mine()

        return wait

    monkeypatch.setattr(weight_stream, "upload", upload)
    plan = spans(path, *[400] * 20)
    stream = WeightStream(plan, buffer_bytes=100, num_buffers=6)
    tensors = [stream.take(span, CPU) for span in plan]
    assert pending, "the last copies are still on their way"
    stream.close()
    assert not pending
    assert [tensor.numpy().tobytes() for tensor in tensors] == [expected(span) for span in plan]


def test_a_file_that_shrank_names_the_tensor(path):
    plan = spans(path, 100, 200)
    with open(path, "r+b") as file:
        file.truncate(150)
    with closing(WeightStream(plan, buffer_bytes=64)) as stream:
        taken(stream, plan[0])
        with pytest.raises(CheckpointError, match=r"tensor 1: the file ended .* bytes early"):
            taken(stream, plan[1])


def test_closing_early_leaves_no_thread(path):
    stream = WeightStream(spans(path, *[100] * 50), buffer_bytes=50)
    stream.take(Span(path, 7, 100, "tensor 0"), CPU)
    threads = stream._threads
    stream.close()
    stream.close()
    assert all(not thread.is_alive() for thread in threads._threads)


def test_nothing_starts_before_the_first_take(path, monkeypatch):
    monkeypatch.setattr(weight_stream, "ThreadPoolExecutor", lambda *args, **named: pytest.fail("threads started"))
    with closing(WeightStream(spans(path, 10))):
        pass


def test_a_safetensors_weight_streams_to_other_devices_only(tmp_path):
    """`meta` stands in for a GPU; the stream answers for it."""
    values = torch.arange(12.0).view(3, 4)
    save_file({"w": values}, tmp_path / "m.safetensors")
    (entry,) = read_safetensors(tmp_path / "m.safetensors")
    weight = SafetensorsWeight(str(tmp_path / "m.safetensors"), entry)
    asked = []

    class Stream:
        def take(self, span, device):
            asked.append((span, device.type))
            return values.view(-1).view(torch.uint8)

    weight.stream = Stream()
    assert torch.equal(weight.read(torch.float32), values)
    assert asked == []
    found = weight.read(torch.bfloat16, torch.device("meta"))
    assert torch.equal(found, values.bfloat16())
    assert asked == [(weight.span, "meta")]


def test_large_dummy_weights_have_no_two_equal_rows():
    weight = DummyWeight("w", (3000, 1024), seed=1)
    rows = weight.read(torch.float32)
    assert len({row.numpy().tobytes() for row in rows}) == 3000
    assert 0.0195 < rows.std() < 0.0205 and abs(rows.mean()) < 1e-4
