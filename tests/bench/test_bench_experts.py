"""Cases of expert layers in `tokenspeed bench kernels`, and what the tuner does without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from waits import WaitsForTheDevice

from tokenspeed.bench import kernel_setting, kernels
from tokenspeed.bench.expert_cases import experts_bytes, experts_flop
from tokenspeed.bench.kernel_cases import cases
from tokenspeed.bench.kernel_setting import NotTimed, Setting
from tokenspeed.checkpoint.local import local_checkpoint
from tokenspeed.config.model import read_model_config
from tokenspeed.kernels.registry import Need, discover
from tokenspeed.moe.interface import Activation, ExpertFormat, MoeNeed
from tokenspeed.protocol.errors import ConfigError

QWEN3_MOE = """{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
 "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2,
 "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
 "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false,
 "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 1, "attention_bias": false}"""


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(kernel_setting, "CACHE_BYTES", 2**16)
    (tmp_path / "config.json").write_text(QWEN3_MOE)
    config = read_model_config(local_checkpoint("tiny", tmp_path, "dummy"))
    return Setting(config, torch.device("cpu"), torch.float32, (1, 3), (20,), context_len=33, page_size=16)


@pytest.mark.parametrize("op", ["route", "experts"])
def test_expert_cases_run_on_the_reference(setting: Setting, op: str) -> None:
    need = Need(setting.device, setting.dtype)
    (reference,) = [found for found in discover() if found.op == op and found.name == "reference"]
    found = cases(setting, op) or []
    assert [case.rows for case in found] == [1, 3, 20]
    with torch.inference_mode():
        for case in found:
            calls = case.make(reference.make(need))
            assert len(calls) == len(setting.copies(case.num_bytes))
            with WaitsForTheDevice() as watched:
                out = calls[0]()
            assert watched.waits is not reference.can_record
            assert isinstance(out[0] if isinstance(out, tuple) else out, torch.Tensor)


def test_sparse_models_have_no_dense_mlp_to_time(setting: Setting) -> None:
    assert set(setting.linears) == {"qkv", "o", "head"}


@pytest.mark.parametrize(("format", "value_bytes"), [("dense", 2.0), ("mxfp4", 17 / 32), ("fp8_block", 1.0)])
def test_bytes_and_operations_by_hand(format: ExpertFormat, value_bytes: float) -> None:
    """One token reads its k experts, very many read all."""
    need = MoeNeed("cpu", torch.bfloat16, 8, 2, 64, 96, format, False, Activation())
    one = 3 * 64 * 96 * value_bytes
    assert experts_bytes(need, 1) == pytest.approx(2 * one + 2 * 64 * 2)
    assert experts_bytes(need, 10_000) == pytest.approx(8 * one + 10_000 * 2 * 64 * 2)
    assert experts_flop(need, 5) == 5 * 2 * 3 * 64 * 96 * 2


def test_a_refusal_is_not_timed(setting: Setting) -> None:
    class Refuses:
        def why_not(self, need: MoeNeed) -> str:
            return f"not {need.format}"

    with pytest.raises(NotTimed, match="not dense"):
        (cases(setting, "experts") or [])[0].make(Refuses())


def test_the_time_limit_names_what_is_left_out(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need(setting.device, setting.dtype)
    ceilings = kernels.Ceilings("x", 1e9, 1e9)
    kind = {"dtype": "float32", "kv_cache_dtype": "float32", "page_size": 16}
    report = kernels.KernelReport(model="m", device="d", **kind, bytes_per_s=1e9, flop_per_s=1e9)
    kernels.measure_op("experts", setting, need, kernels.Timer(need, 1), ceilings, report, deadline=0.0)
    assert not report.rows
    assert any("3 rows: --time-limit" in line for line in report.not_timed)


def test_tuning_needs_experts_and_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(QWEN3_MOE)
    with pytest.raises(ConfigError, match="--tune measures kernels of a GPU"):
        kernels.run(["--tune", "--model-config", str(tmp_path), "--device", "cpu"])


def test_plans_reach_to_the_middle() -> None:
    pytest.importorskip("triton")
    from tokenspeed.bench.expert_tiles import block_ms, tile_candidates
    from tokenspeed.bench.expert_tune import _spread
    from tokenspeed.kernels.triton.moe_plans import NO_LIMIT, ExpertPlan, ExpertShape

    plans = [ExpertPlan(1, gemv=True), ExpertPlan(4), ExpertPlan(64)]
    spread = list(_spread(plans, (ExpertPlan(NO_LIMIT, block_m=32),)))
    assert [plan.max_tokens for plan in spread] == [2, 16, NO_LIMIT]
    assert spread[0].gemv and spread[-1].block_m == plans[-1].block_m
    kept = list(_spread(plans, (ExpertPlan(80), ExpertPlan(NO_LIMIT, block_m=32))))
    assert [(plan.max_tokens, plan.block_m) for plan in kept[2:]] == [(80, plans[-1].block_m), (NO_LIMIT, 32)]
    for format in ("dense", "mxfp4", "fp8_block"):
        shape = ExpertShape(format, 32, 4, 2880, 2880)
        sizes = {size for tokens in (1, 32, 100, 256, 1000, 8192) for size in block_ms(shape, tokens)}
        assert sizes == {16, 32, 64, 128} | ({8} if format == "mxfp4" else set())
        for size in sizes:
            for is_up in (True, False):
                tiles = list(tile_candidates(format, size, is_up))
                assert len(tiles) == len(set(tiles)) >= 4
                assert all(tile.split_k == 1 for tile in tiles) or not is_up
