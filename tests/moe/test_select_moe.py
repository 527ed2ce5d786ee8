"""Which backend runs the experts: the flag, the choice, and what a user hears who asks for what cannot be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenspeed.config import moe_choices
from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.distributed.mesh import SINGLE, Axis, Mesh
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.gpt_oss import EXAMPLE
from tokenspeed.moe.interface import Activation, MoeNeed
from tokenspeed.moe.select import BACKENDS, moe_need, select_moe
from tokenspeed.protocol.errors import ConfigError

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32))
NEED = moe_need(EXAMPLE, SINGLE, "mxfp4", OPS)
CONTRACT = {
    *("auto", "triton", "gluon", "marlin", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl"),
    *("deep_gemm", "mega_moe"),
}


def test_need_says_what_the_config_says() -> None:
    assert MoeNeed("cpu", torch.float32, 4, 2, 64, 96, "mxfp4", True, Activation(7.0, 1.702)) == NEED
    assert moe_need(EXAMPLE, Mesh(tp=Axis(1, 2)), "dense", OPS).intermediate_size == 48
    with pytest.raises(ConfigError, match="intermediate size of an expert is 96, which 5 ranks"):
        moe_need(EXAMPLE, Mesh(tp=Axis(0, 5)), "dense", OPS)


def test_auto_takes_what_runs_here_and_says_why_not_the_others() -> None:
    selected, report = select_moe(NEED, "auto", OPS)
    assert selected.backend.name == "torch"
    assert selected.need is NEED
    assert report == [
        "MoE backend: torch, 4 experts a layer, 2 a token, kept in MXFP4 (not triton: it needs an NVIDIA GPU)"
    ]


def test_asked_for() -> None:
    selected, report = select_moe(NEED, "torch", OPS)
    assert selected.backend.name == "torch"
    assert "torch (asked for)" in report[0]


def test_a_choice_that_cannot_run_names_what_would() -> None:
    with pytest.raises(
        ConfigError, match=r"--moe-backend triton cannot run on cpu: .*NVIDIA.*; use one of: auto, torch"
    ):
        select_moe(NEED, "triton", OPS)
    with pytest.raises(ConfigError, match=r"there is no backend of this name; use one of: auto, torch"):
        select_moe(NEED, "no_such", OPS)


def test_no_kernels_for_the_device() -> None:
    with pytest.raises(
        ConfigError, match=r"no MoE backend can serve the experts of this model on cpu: .*no expert kernel"
    ):
        select_moe(NEED, "auto", replace(OPS, experts=None))
    with pytest.raises(
        ConfigError, match=r"--moe-backend torch: there are no expert kernels for cpu in float32; no backend can serve"
    ):
        select_moe(NEED, "torch", replace(OPS, experts=None))
    with pytest.raises(ConfigError, match=r"--moe-backend marlin: .*no biases.*; no backend can serve .*triton: "):
        select_moe(NEED, "marlin", replace(OPS, experts=None))


@pytest.mark.parametrize("name", moe_choices.WITHOUT_IMPLEMENTATION)
def test_names_of_the_contract_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--moe-backend {name} cannot run on a GPU: .*use one of: auto, triton$"):
        moe_choices.check(name, "cuda", True)
    with pytest.raises(ConfigError, match="use one of: auto, torch"):
        select_moe(NEED, name, OPS)


def test_every_name_of_the_contract_has_an_answer() -> None:
    assert {"auto", *moe_choices.GPU_BACKENDS, *moe_choices.WITHOUT_IMPLEMENTATION} >= CONTRACT
    assert not {backend.name for backend in BACKENDS} & moe_choices.WITHOUT_IMPLEMENTATION.keys()


@pytest.mark.parametrize(("device", "where", "ours"), [("cpu", "a CPU", "torch"), ("cuda", "a GPU", "triton")])
def test_each_name_says_why_not_and_what_would_run(device, where: str, ours: str) -> None:
    wrong = {**moe_choices.WITHOUT_IMPLEMENTATION, "tritn": "there is no backend of this name (did you mean triton?)"}
    for choice, reason in wrong.items():
        with pytest.raises(ConfigError) as refused:
            moe_choices.check(choice, device, True)
        assert str(refused.value) == (
            f"--moe-backend {choice} cannot run on {where}: {reason}; use one of: auto, {ours}"
        )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gluon", "AMD gfx950"), ("gluon_petit", "AMD gfx950"), ("gluon_petit", "1024 tokens a GPU"),
        ("marlin", "no biases"), ("flashinfer_trtllm", "Blackwell"), ("flashinfer_cutedsl", "Blackwell"),
        ("flashinfer_cutlass", "no adapter"), ("deep_gemm", "no adapter"), ("mega_moe", "DeepSeek V4"),
    ],
)  # fmt: skip
def test_reasons_are_those_of_the_contract(name: str, part: str) -> None:
    """Of its sections 1.5, 4.2 and 9, and of the issue."""
    assert part in moe_choices.WITHOUT_IMPLEMENTATION[name]


def test_the_flag_names_every_backend() -> None:
    assert {*moe_choices.CPU_BACKENDS, *moe_choices.GPU_BACKENDS} == {backend.name for backend in BACKENDS}


@pytest.mark.parametrize(("device", "there", "here"), [("cpu", "triton", "torch"), ("cuda", "torch", "triton")])
def test_flag_of_another_device(device, there: str, here: str) -> None:
    moe_choices.check("auto", device, False)
    moe_choices.check(here, device, True)
    with pytest.raises(
        ConfigError, match=f"--moe-backend {there} cannot run on .*: it is for .*use one of: auto, {here}$"
    ):
        moe_choices.check(there, device, True)


@pytest.mark.parametrize(
    ("stored", "on_load", "kept"),
    [
        (QuantizationConfig(method="mxfp4", granularity="group", activations="none"), None, "MXFP4"),
        (QuantizationConfig(method="fp8", granularity="block", activations="dynamic"), None, "e4m3"),
        (None, "fp8", "e4m3"),
    ],
)
def test_float16_and_experts_in_fewer_bits(stored: QuantizationConfig | None, on_load: str | None, kept: str) -> None:
    """No backend serves them, so the advice is another dtype and not a backend."""
    for has_experts, dtype in ((False, "float16"), (True, "bfloat16"), (True, "float32")):
        moe_choices.check_dtype(dtype, has_experts, stored, on_load)
    with pytest.raises(ConfigError, match=rf"kept in {kept}.* float16; use --dtype bfloat16$"):
        moe_choices.check_dtype("float16", True, stored, on_load)


def test_float16_and_experts_that_are_widened_while_they_load() -> None:
    channel = QuantizationConfig(method="fp8", granularity="channel", activations="dynamic")
    for stored in (None, channel):
        moe_choices.check_dtype("float16", True, stored, None)


def test_a_model_without_experts_refuses_the_flag() -> None:
    with pytest.raises(ConfigError, match="--moe-backend is torch, but this model has no expert layers"):
        moe_choices.check("torch", "cpu", False)
