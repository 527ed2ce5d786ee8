"""`bench kernels --tune` from its candidates to its file: kernels run in the interpreter (or on a GPU), only time is
made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from tokenspeed.bench import expert_tune
from tokenspeed.bench.expert_tiles import block_ms, tiles_to_try, ways
from tokenspeed.bench.expert_tune import ExpertTuner, _half_hidden, _plan, tune_to_file
from tokenspeed.kernels.registry import Implementation, Need
from tokenspeed.kernels.triton import moe_experts, moe_grouped, moe_mxfp4_fp16, moe_steps
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels
from tokenspeed.kernels.triton.moe_grouped import GroupedTile
from tokenspeed.kernels.triton.moe_mxfp4_fp16 import Fp16Tile, half_scale, in_order
from tokenspeed.kernels.triton.moe_mxfp4_mma import MmaTile
from tokenspeed.kernels.triton.moe_plans import (
    FP16_PLANS,
    NO_LIMIT,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    ShapePlans,
    choose,
    heuristic_plans,
    read_table,
)
from tokenspeed.moe.interface import Activation, MoeNeed
from tokenspeed.protocol.errors import ConfigError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEED = MoeNeed(DEVICE.type, torch.float32, 4, 2, 64, 32, "dense", True, Activation())
WHERE = Need(DEVICE, torch.float32)
WRONG, SLOW, GOOD, BROKEN = (GroupedTile(32, 32, 1, stages, 4) for stages in (1, 2, 3, 4))
TILE_US = {WRONG: 1.0, SLOW: 9.0, GOOD: 3.0}
GEMV_US, TILED_US = 50.0, 70.0
OTHER = ShapePlans(ExpertShape("dense", 8, 2, 64, 32), "long ago", (ExpertPlan(NO_LIMIT, block_m=32),))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tuner with four tiles, of which one gives wrong numbers and one does not run. What it said is appended."""
    launched: list[GroupedTile] = []

    def gate_up(x, matrix, grouping, top_k, activation, tile) -> torch.Tensor:
        launched.append(tile)
        return _spoilt(moe_grouped.grouped_gate_up(x, matrix, grouping, top_k, activation, tile, False), tile)

    def down(h, matrix, grouping, weights, activation, dtype, tile) -> torch.Tensor:
        launched.append(tile)
        return _spoilt(moe_grouped.grouped_down(h, matrix, grouping, weights, dtype, tile, False), tile)

    def time_us(tuner: ExpertTuner, call: Callable[[int], torch.Tensor]) -> float:
        """A tile alone by the tile, a whole layer by its kernels."""
        launched.clear()
        call(0)
        return TILE_US[launched[0]] if len(launched) == 1 else TILED_US if launched else GEMV_US

    steps = replace(moe_steps.GROUPED, gate_up=gate_up, down=down)
    for module in (expert_tune, moe_experts):
        monkeypatch.setattr(module, "steps_of", lambda *_: steps)
    monkeypatch.setattr(expert_tune, "tiles_to_try", lambda *_: iter((WRONG, SLOW, GOOD, BROKEN)))
    monkeypatch.setattr(expert_tune, "compile_all", lambda *_: 4)  # in processes of their own
    monkeypatch.setattr(ExpertTuner, "_graph_us", time_us)
    made = TritonExpertKernels(DEVICE, False, None, 2**16, "a GPU", "not here")
    ours = Implementation("experts", "triton", 50, lambda need: None, lambda need: made)
    monkeypatch.setattr(moe_experts, "IMPLEMENTATIONS", (ours,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    lines: list[str] = []
    monkeypatch.setattr("builtins.print", lambda line, **_: lines.append(line))
    return lines


def _spoilt(result: torch.Tensor, tile: GroupedTile) -> torch.Tensor:
    if tile == BROKEN:
        raise RuntimeError("out of shared memory")
    return result + 1 if tile == WRONG else result


def test_the_fastest_right_tiles_go_to_the_file_beside_other_shapes(said: list[str], tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    old = ShapePlans(ExpertShape.of(NEED), "before", (ExpertPlan(NO_LIMIT, block_m=64),))
    file.write_bytes(msgspec.json.encode(ExpertTable("a GPU", (old, OTHER))))
    tune_to_file(NEED, (1, 9), None, str(file), WHERE)
    table = read_table(file.read_bytes())
    assert table.gpu == "a GPU" and len(table.experts) == 2
    assert table.find(OTHER.shape) == OTHER, "neither its plans nor its date"
    tuned = table.find(ExpertShape.of(NEED))
    assert tuned is not None and f"torch {torch.__version__}, triton" in tuned.measured
    before = heuristic_plans(tuned.shape, True, 2**16, True)
    assert tuned.measured.endswith(", 1 to 9 tokens") and [plan.max_tokens for plan in before] == [8, 64, NO_LIMIT]
    assert [plan.max_tokens for plan in tuned.plans] == [3, 64, NO_LIMIT], "to the geometric middle of 1 and 9"
    assert tuned.plans[-1] == before[-1], "Regression: a table for few tokens gave prompts its tiles"
    assert choose(tuned.plans, 1).gemv, "faster in time that is made up, at most 8 tokens"
    many = choose(tuned.plans, 9)
    assert (many.gemv, many.block_m, many.gate_up, many.down) == (False, 16, GOOD, GOOD)
    for start, count in (("WRONG 9 tokens, gate_up", 1), ("WRONG 9 tokens, down", 1), ("FAILED 9 tokens", 2)):
        assert len([line for line in said if line.startswith(start)]) == count


def test_plans_that_engines_have_stay_where_none_is_faster(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 8 tokens they are those of the GEMV, for 9 others; every candidate is wrong here."""
    monkeypatch.setattr(expert_tune, "tiles_to_try", lambda *_: iter((WRONG,)))
    file = tmp_path / "table.json"
    tune_to_file(NEED, (1, 9), None, str(file), WHERE)
    (entry,) = read_table(file.read_bytes()).experts
    before = heuristic_plans(entry.shape, True, 2**16, True)
    assert [choose(entry.plans, count) for count in (9, 65)] == list(before[1:]) and choose(entry.plans, 1).gemv
    assert [line for line in said if "9 tokens, as engines do now: 70.0 us" in line]


def test_the_default_file_is_named_after_the_gpu(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tune_to_file(NEED, (9,), None, None, WHERE)
    (entry,) = read_table((tmp_path / "a_GPU.json").read_bytes()).experts
    assert entry.shape == ExpertShape.of(NEED)
    assert "written: a_GPU.json" in said


def test_a_limit_that_is_too_short_writes_nothing(said: list[str], tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    with pytest.raises(ConfigError, match=r"no tile of the expert kernels could be measured.*longer --time-limit"):
        tune_to_file(NEED, (1,), 1e-9, str(file), WHERE)
    assert "1 tokens: not reached in time" in said and not file.exists()


def test_prompts_of_mxfp4_experts_are_tried_on_float16_tensor_cores_too() -> None:
    """What serves without a table is among the candidates, or the tuner could only make things worse."""
    need = MoeNeed("cuda", torch.bfloat16, 32, 4, 2880, 2880, "mxfp4", True, Activation(7.0, 1.702))
    found: dict[int, list[Fp16Tile]] = {}
    for count in (1, 64, 256, 512, 1024, 8000):
        for block_m in block_ms(ExpertShape.of(need), count):
            for fp16 in ways(need, block_m):
                tiles = list(tiles_to_try(need, count, block_m, True, fp16))
                assert tiles and all(isinstance(tile, Fp16Tile if fp16 else MmaTile) for tile in tiles)
                plan = _plan(count, block_m, tiles[0], tiles[-1], False)
                assert (plan.fp16 is not None, plan.mma is not None) == (fp16, not fp16)
                if fp16:
                    found[block_m] = [tile for tile in tiles if isinstance(tile, Fp16Tile)]
    assert all(tile in found[block_m] for _, _, block_m, tile in FP16_PLANS)
    no_limit = MoeNeed("cuda", torch.bfloat16, 32, 4, 2880, 2880, "mxfp4", True, Activation())
    assert ways(no_limit, 128) == (False,) and ways(need, 16) == (False,)


def test_h_for_float16_tensor_cores_is_h(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_tune, "half_rows", lambda h: moe_mxfp4_fp16.half_rows(h, False))
    activation = Activation(7.0, 1.702)
    h = torch.randn(5, 96, device=DEVICE).bfloat16().float()
    half = _half_hidden(h, activation)
    assert half.dtype == torch.float16 and not torch.equal(half.float(), h * half_scale(activation))
    assert torch.equal(in_order(half).float() / half_scale(activation), h)
