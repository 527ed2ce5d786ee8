"""Selection explains itself, and an explicit choice that cannot run names what would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenspeed.attention.interface import AttentionNeed
from tokenspeed.attention.select import BACKENDS, CONTRACT_ONLY, select_backend
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.protocol.errors import ConfigError

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32))
NEED = AttentionNeed("cpu", torch.float32, num_heads=4, num_kv_heads=2, head_dim=16, page_size=16)


def test_auto_takes_a_backend_and_says_so() -> None:
    backend, report = select_backend(NEED, "auto", OPS)
    assert backend.name == "paged"
    assert report == ["attention: paged"]


def test_an_explicit_choice() -> None:
    backend, report = select_backend(NEED, "paged", OPS)
    assert backend.name == "paged"
    assert report == ["attention: paged (asked for)"]


@pytest.mark.parametrize("name", CONTRACT_ONLY)
def test_contract_names_are_refused_with_their_reason(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        select_backend(NEED, name, OPS)
    assert CONTRACT_ONLY[name] in str(refused.value)
    assert "use one of: auto, paged" in str(refused.value)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"no backend of this name; use one of: auto, paged"):
        select_backend(NEED, "pagde", OPS)


@pytest.mark.parametrize("choice", ["auto", "paged", "fa3"])
@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (replace(NEED, has_sinks=True), "sinks"),
        (replace(NEED, logit_cap=30.0), "logit cap.*30"),
        (replace(NEED, num_heads=5), "5 query heads"),
    ],
)
def test_a_need_that_nothing_serves(need: AttentionNeed, reason: str, choice: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        select_backend(need, choice, OPS)


def test_no_backend_shares_a_name_with_a_refused_one() -> None:
    assert not {backend.name for backend in BACKENDS} & CONTRACT_ONLY.keys()
