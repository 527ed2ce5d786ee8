"""Selection explains itself, and an explicit choice that cannot run names what would. Every backend file keeps the
contract of `AttentionBackend`."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Literal

import pytest
import torch

import tokenspeed.attention
from tokenspeed.attention.interface import NEEDS_GPU, AttentionNeed
from tokenspeed.attention.select import BACKENDS, Backend, select_backend
from tokenspeed.config.attention_choices import CPU_BACKENDS, GPU_BACKENDS, MHA, NAMES, WITHOUT_IMPLEMENTATION, settle
from tokenspeed.config.engine import Choice
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.protocol.errors import ConfigError

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32))
NEED = AttentionNeed("cpu", torch.float32, num_heads=4, num_kv_heads=2, head_dim=16, page_size=16)
HOPPER = AttentionNeed("cuda", torch.bfloat16, 32, 8, 128, 128, kv_dtype=torch.bfloat16, capability=(9, 0))
CONTRACT = {
    *("mha", "mla", "fa3", "fa4", "triton", "flashinfer", "trtllm", "trtllm_mla", "flashmla", "tokenspeed_mla"),
    "hybrid_linear_attn",
}


def test_every_name_of_the_contract_is_known() -> None:
    known = {MHA, *CPU_BACKENDS, *GPU_BACKENDS, *WITHOUT_IMPLEMENTATION}
    assert known >= CONTRACT
    assert {backend.name for backend in BACKENDS} == {*CPU_BACKENDS, *GPU_BACKENDS}
    assert not {backend.name for backend in BACKENDS} & WITHOUT_IMPLEMENTATION.keys()


def test_every_backend_file_is_listed() -> None:
    found = set()
    for module in pkgutil.iter_modules(tokenspeed.attention.__path__, "tokenspeed.attention."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__module__ == module.name and hasattr(value, "name"):
                found.add(value)
    assert {backend for backend in found if isinstance(backend.name, str)} == set(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_says_what_it_cannot_serve(backend: Backend) -> None:
    at_home = NEED if backend.name in CPU_BACKENDS else HOPPER
    elsewhere = replace(at_home, device="cuda" if at_home.device == "cpu" else "cpu")
    reason = backend.why_not(elsewhere)
    assert reason is not None and ("GPU" in reason)
    has_sinks = backend.name in ("fa4", "flashinfer")
    assert ("sinks" in (backend.why_not(replace(at_home, has_sinks=True, window=128)) or "")) == has_sinks
    capped = backend.why_not(replace(at_home, logit_cap=30.0))
    assert ("logit cap (asked: 30.0)" in (capped or "")) == (backend.name not in ("paged", "triton"))
    assert "query heads" in (backend.why_not(replace(at_home, num_heads=at_home.num_kv_heads * 2 + 1)) or "")
    assert isinstance(backend.can_record, bool) and (backend.note is None or backend.note)


@pytest.mark.parametrize("name", ["fa3", "fa4", "flashinfer"])
def test_an_adapter_without_its_package_says_what_to_install(name: str) -> None:
    (backend,) = (backend for backend in BACKENDS if backend.name == name)
    assert "is not installed" in (backend.why_not(HOPPER) or "")
    assert "16-bit" in (backend.why_not(replace(HOPPER, dtype=torch.float32)) or "")
    assert "float8_e4m3fn" in (backend.why_not(replace(HOPPER, kv_dtype=torch.float8_e4m3fn)) or "")
    assert "compute capability" in (backend.why_not(replace(HOPPER, capability=(7, 5))) or "")
    assert "head_dim of 100" in (backend.why_not(replace(HOPPER, head_dim=100)) or "")
    with pytest.raises(ConfigError, match=rf"{name} cannot run on cuda: .*not installed; use one of: auto, triton"):
        select_backend(HOPPER, name, OPS)


def test_pages_of_another_length() -> None:
    (fa4,) = (backend for backend in BACKENDS if backend.name == "fa4")
    assert "--prefix-granularity is 64 (set it to 128)" in (fa4.why_not(replace(HOPPER, page_size=64)) or "")


def test_auto_takes_our_own_and_says_why_not_the_others() -> None:
    backend, (line,) = select_backend(NEED, "auto", OPS)
    assert backend.name == "paged"
    assert line == f"attention: paged (not triton, fa3, fa4, flashinfer: {NEEDS_GPU})"
    backend, (line,) = select_backend(HOPPER, "auto", OPS)
    assert backend.name == "triton"
    assert line.startswith("attention: triton (not paged: it is for CPUs; on a GPU use triton; fa3: the package")


def test_an_explicit_choice() -> None:
    backend, report = select_backend(NEED, "paged", OPS)
    assert backend.name == "paged"
    assert report == ["attention: paged (asked for)"]
    backend, report = select_backend(HOPPER, "triton", OPS)
    assert backend.name == "triton"
    assert report == ["attention: triton (asked for)"]


def test_sinks_and_windows_are_served_by_our_own() -> None:
    """And an adapter that has none is refused with that reason."""
    for need, name in ((NEED, "paged"), (HOPPER, "triton")):
        backend, _ = select_backend(replace(need, window=128, has_sinks=True, head_dim=64), "auto", OPS)
        assert backend.name == name
    with pytest.raises(ConfigError, match=r"fa4 cannot run on cuda: .*no attention sinks; use one of: auto, triton"):
        select_backend(replace(HOPPER, has_sinks=True), "fa4", OPS)


@pytest.mark.parametrize("name", WITHOUT_IMPLEMENTATION)
def test_names_without_an_implementation_are_refused_with_their_reason(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        select_backend(NEED, name, OPS)
    assert WITHOUT_IMPLEMENTATION[name] in str(refused.value)
    assert "use one of: auto, paged" in str(refused.value)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"no backend of this name; use one of: auto, paged"):
        select_backend(NEED, "pagde", OPS)


@pytest.mark.parametrize(("device", "where", "ours"), [("cpu", "a CPU", "paged"), ("cuda", "a GPU", "triton")])
def test_a_choice_that_cannot_run_here_is_refused_before_the_start(
    device: Literal["cpu", "cuda"], where: str, ours: str
) -> None:
    """Whatever is named instead runs on this device, with no other package."""
    here = {"cpu": CPU_BACKENDS, "cuda": GPU_BACKENDS}[device]
    for choice in ("auto", *here):
        assert settle(choice, device, []) == choice
    wrong = {name: "it is for a" for name in {*CPU_BACKENDS, *GPU_BACKENDS} - {*here}}
    wrong |= WITHOUT_IMPLEMENTATION | {"pagde": "there is no backend of this name (did you mean paged?)"}
    for choice, reason in wrong.items():
        with pytest.raises(ConfigError) as refused:
            settle(choice, device, [])
        text = str(refused.value)
        assert text.startswith(f"--attention-backend {choice} cannot run on {where}: {reason}")
        assert text.endswith(f"; use one of: auto, {ours}")


def test_mha_is_auto_and_says_so() -> None:
    for device in ("cpu", "cuda"):
        said: list[Choice] = []
        assert settle("mha", device, said) == "auto"
        assert [(choice.name, choice.value) for choice in said] == [("--attention-backend", "auto")]
        assert said[0].reason.startswith("mha names no kernels")
    assert "mha" in NAMES.shown


@pytest.mark.parametrize("choice", ["auto", "paged", "fa3"])
@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (replace(NEED, num_heads=5), "5 query heads"),
        (replace(NEED, device="cuda", num_heads=5), "5 query heads"),
    ],
)
def test_a_need_that_nothing_serves(need: AttentionNeed, reason: str, choice: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        select_backend(need, choice, OPS)
