from __future__ import annotations

import pytest
import torch

from tokenspeed.protocol.step import TokenLogprobs
from tokenspeed.sampling.chunks import row_chunks
from tokenspeed.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_equal_log_softmax(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, 1000, generator=generator) * 4
    ids = torch.randint(0, 1000, (num_rows,), generator=generator)
    ks = [row % 4 for row in range(num_rows)]
    want = torch.log_softmax(logits.double(), -1)
    order = want.argsort(descending=True)
    for row, entry in enumerate(token_logprobs(logits, ids, ks)):
        assert entry.token_id == ids[row]
        assert entry.logprob == pytest.approx(float(want[row, ids[row]]), abs=1e-4)
        assert order[row, entry.rank - 1] == ids[row]
        assert entry.top_ids == order[row, : ks[row]].tolist()
        assert entry.top_logprobs == pytest.approx(want[row, order[row, : ks[row]]].tolist(), abs=1e-4)


def test_impossible_token_and_more_than_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, -torch.inf]])
    (entry,) = token_logprobs(logits, torch.tensor([1]), [5])
    assert entry == TokenLogprobs(1, -torch.inf, 2, [0, 1], [0.0, -torch.inf])


def test_no_rows() -> None:
    assert token_logprobs(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), []) == []


def test_half_precision_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    (entry,) = token_logprobs(logits, torch.tensor([2]), [1])
    assert entry.logprob == pytest.approx(-0.40760597, abs=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 50_000, 10**7])
def test_chunks_cover_all_rows(vocab_size: int) -> None:
    rows = [row for part in row_chunks(10, vocab_size, torch.device("cpu")) for row in range(10)[part]]
    assert rows == list(range(10))
