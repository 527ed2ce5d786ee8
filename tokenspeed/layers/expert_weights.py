"""How the experts of one layer come out of a checkpoint: every layout into the one order of `ExpertWeights`.

Each tensor goes to its place as it is read; besides the layer's own storage there is never more than one checkpoint
tensor. MXFP4 bytes stay as they are. A rank keeps a range of every expert's intermediate columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tokenspeed.config.moe import MoeConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.entry import Entries, Entry
from tokenspeed.moe.interface import ExpertWeights, MoeNeed
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.quantization.fp8_format import BLOCK, E4M3, Fp8Source, Fp8Tensor, quantize_blocks
from tokenspeed.quantization.interface import Scheme, WeightTensor

GATE, UP = 0, 1
GROUP = 32
"""Values of a row that share an MXFP4 scale."""
LARGEST_SCALE = 252
"""6 * 2 ** (252 - 127), with 6 the largest code, is the last that float32 and bfloat16 hold; 255 is NaN."""


class ExpertLoad:
    """Collects one layer's experts. Used until `take`.

    Args:
        prefix: HF name of the module (`model.layers.3.mlp.experts`).
    Raises:
        ConfigError: a rank's columns would cut a group or block of scales.
        CheckpointError: sizes that MXFP4 groups do not divide.
    """

    def __init__(self, moe: MoeConfig, mesh: Mesh, need: MoeNeed, scheme: Scheme, ops: Ops, prefix: str) -> None:
        self._num_experts, self._hidden, self._inner = moe.num_experts, need.hidden_size, moe.intermediate_size
        self._columns = mesh.tp.split(self._inner, "the intermediate size of an expert")
        self._keeps_down_bias = mesh.tp.rank == 0
        self._layout, self._has_bias = moe.layout, moe.expert_bias
        self._format = need.format
        self._scheme, self._ops, self._prefix = scheme, ops, prefix
        self._weights = ExpertWeights(need.format, torch.empty(0), torch.empty(0))
        self._check_columns()
        self._missing = set(self.entries())

    def entries(self) -> Entries:
        """See `MoeConfig.layout` for names and shapes."""
        if self._layout == "per_expert":
            return self._per_expert()
        if self._layout == "fused":
            gate_up, down = (2 * self._inner, self._hidden), (self._hidden, self._inner)
            wanted = {
                "gate_up_proj": (gate_up, self._load_fused_gate_up),
                "down_proj": (down, self._load_fused_down),
            }
        else:
            gate_up, down = (self._hidden, 2 * self._inner), (self._inner, self._hidden)
            wanted = {
                "gate_up_proj": (gate_up, self._load_interleaved_gate_up),
                "down_proj": (down, self._load_interleaved_down),
            }
        if self._format == "mxfp4":
            return self._mxfp4() | self._biases()
        return {
            f"{self._prefix}.{name}": self._entry((self._num_experts, *shape), load)
            for name, (shape, load) in wanted.items()
        } | self._biases()

    def take(self) -> ExpertWeights:
        """Everything that came, once.

        Raises:
            CheckpointError: a tensor never came.
        """
        if self._missing:
            name = min(self._missing)
            more = f" and {len(self._missing) - 1} more of this layer" if len(self._missing) > 1 else ""
            raise CheckpointError(f"{name}{more} was not in the checkpoint")
        weights = self._weights
        self._weights = ExpertWeights(self._format, torch.empty(0), torch.empty(0))
        return weights

    def _check_columns(self) -> None:
        first, last = self._columns
        if self._format == "mxfp4":
            for what, size in (("hidden_size", self._hidden), ("intermediate_size", self._inner)):
                if size % GROUP:
                    raise CheckpointError(f"{self._prefix}: {what} is {size}, MXFP4 needs a multiple of {GROUP}")
        unit = {"dense": 1, "mxfp4": GROUP, "fp8_block": BLOCK}[self._format]
        if first % unit or (last % unit and last != self._inner):
            raise ConfigError(
                f"{self._prefix}: a rank would have columns {first} to {last} of {self._inner}, which cuts the scales "
                f"of {unit} values; use fewer tensor-parallel ranks"
            )

    # --- what is wanted --------------------------------------------------------------------------------------------

    def _entry(self, shape: tuple[int, ...], load: Callable[[WeightTensor], None], is_raw: bool = False) -> Entry:
        def rule(weight: WeightTensor) -> None:
            if tuple(weight.shape) != shape:
                raise CheckpointError(f"{weight.where}: shape {list(weight.shape)}, expected {list(shape)}")
            load(weight)
            self._missing.discard(weight.name)

        return Entry(shape, rule, is_raw)

    def _per_expert(self) -> Entries:
        inner, hidden = self._inner, self._hidden
        wanted: Entries = {}
        for expert in range(self._num_experts):
            name = f"{self._prefix}.{expert}"
            for part, half in (("gate_proj", GATE), ("up_proj", UP)):
                load = partial(self._load_half, expert, half)
                wanted[f"{name}.{part}.weight"] = self._entry((inner, hidden), load)
            wanted[f"{name}.down_proj.weight"] = self._entry((hidden, inner), partial(self._load_down, expert))
        return wanted

    def _mxfp4(self) -> Entries:
        wanted: Entries = {}
        for part, rows, columns in (
            ("gate_up_proj", 2 * self._inner, self._hidden),
            ("down_proj", self._hidden, self._inner),
        ):
            shape = (self._num_experts, rows, columns // GROUP)
            for kind, tail in (("blocks", (GROUP // 2,)), ("scales", ())):
                load = partial(self._load_bytes, part, kind)
                wanted[f"{self._prefix}.{part}_{kind}"] = self._entry((*shape, *tail), load, is_raw=True)
        return wanted

    def _biases(self) -> Entries:
        if not self._has_bias:
            return {}
        return {
            f"{self._prefix}.gate_up_proj_bias": self._entry(
                (self._num_experts, 2 * self._inner), self._load_gate_up_bias
            ),
            f"{self._prefix}.down_proj_bias": self._entry((self._num_experts, self._hidden), self._load_down_bias),
        }

    # --- one expert's matrix at a time -----------------------------------------------------------------------------

    def _load_half(self, expert: int, half: int, weight: WeightTensor) -> None:
        """gate or up [I, H] of one expert."""
        if self._format == "fp8_block":
            self._put_half_fp8(expert, half, self._fp8(weight))
        else:
            self._halves()[expert, :, half] = self._read(weight)[slice(*self._columns)]

    def _load_down(self, expert: int, weight: WeightTensor) -> None:
        """down [H, I] of one expert."""
        if self._format == "fp8_block":
            self._put_down_fp8(expert, self._fp8(weight))
        else:
            self._down()[expert] = self._read(weight)[:, slice(*self._columns)]

    # --- all experts of a layer at once ----------------------------------------------------------------------------

    def _load_fused_gate_up(self, weight: WeightTensor) -> None:
        """[E, 2 I, H], gate rows then up rows."""
        rows = self._read(weight)
        self._put_halves(rows[:, : self._inner], rows[:, self._inner :])

    def _load_interleaved_gate_up(self, weight: WeightTensor) -> None:
        """[E, H, 2 I], columns gate, up, gate, ..."""
        rows = self._read(weight).transpose(1, 2)
        self._put_halves(rows[:, 0::2], rows[:, 1::2])

    def _load_fused_down(self, weight: WeightTensor) -> None:
        """[E, H, I]."""
        self._put_downs(self._read(weight))

    def _load_interleaved_down(self, weight: WeightTensor) -> None:
        """[E, I, H]."""
        self._put_downs(self._read(weight).transpose(1, 2))

    def _put_halves(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        for half, matrices in ((GATE, gate), (UP, up)):
            if self._format == "fp8_block":
                for expert in range(self._num_experts):
                    self._put_half_fp8(expert, half, quantize_blocks(matrices[expert]))
            else:
                self._halves()[:, :, half] = matrices[:, slice(*self._columns)]

    def _put_downs(self, down: torch.Tensor) -> None:
        if self._format == "fp8_block":
            for expert in range(self._num_experts):
                self._put_down_fp8(expert, quantize_blocks(down[expert]))
        else:
            self._down().copy_(down[:, :, slice(*self._columns)])

    # --- MXFP4 bytes and biases ------------------------------------------------------------------------------------

    def _load_bytes(self, part: str, kind: str, weight: WeightTensor) -> None:
        """blocks [E, rows, groups, 16] or scales [E, rows, groups]; of gate and up this rank's rows, of down groups."""
        first, last = self._columns
        stored = weight.read(torch.uint8, self._ops.device)
        if kind == "scales" and (largest := int(stored.max())) > LARGEST_SCALE:
            raise CheckpointError(
                f"{weight.where}: holds the scale {largest}, which makes no numbers, expected at most {LARGEST_SCALE}; "
                "download it again"
            )
        mine = (
            stored[:, 2 * first : 2 * last] if part == "gate_up_proj" else stored[:, :, first // GROUP : last // GROUP]
        )
        if kind == "blocks":
            mine = mine.flatten(2)
        mine = mine.contiguous()
        if part == "gate_up_proj" and kind == "blocks":
            self._weights.gate_up = mine
        elif part == "gate_up_proj":
            self._weights.gate_up_scale = mine
        elif kind == "blocks":
            self._weights.down = mine
        else:
            self._weights.down_scale = mine

    def _load_gate_up_bias(self, bias: WeightTensor) -> None:
        first, last = self._columns
        self._weights.gate_up_bias = self._read(bias)[:, 2 * first : 2 * last].contiguous()

    def _load_down_bias(self, bias: WeightTensor) -> None:
        """Partial results of all ranks are summed: one of them has the bias."""
        if self._keeps_down_bias:
            self._weights.down_bias = self._read(bias)

    # --- storage ---------------------------------------------------------------------------------------------------

    def _read(self, weight: WeightTensor) -> torch.Tensor:
        return weight.read(self._ops.dtype, self._ops.device)

    def _fp8(self, weight: WeightTensor) -> Fp8Tensor:
        if isinstance(weight, Fp8Source):
            return weight.fp8(self._ops.device)
        if not self._scheme.quantizes:
            raise CheckpointError(f"{weight.where} is not e4m3, as the checkpoint's other experts are")
        return quantize_blocks(self._read(weight))

    def _put_half_fp8(self, expert: int, half: int, whole: Fp8Tensor) -> None:
        part = whole.cut(None, self._columns)
        assert part is not None, "columns were checked to be whole blocks"
        self._halves()[expert, :, half] = part.weight
        scale, rows = self._weights.gate_up_scale, part.scale.shape[0]
        if scale is None:
            scale = self._empty_scale(2 * rows, part.scale.shape[1])
            self._weights.gate_up_scale = scale
        scale[expert, half * rows : (half + 1) * rows] = part.scale

    def _put_down_fp8(self, expert: int, whole: Fp8Tensor) -> None:
        part = whole.cut(self._columns, None)
        assert part is not None, "columns were checked to be whole blocks"
        self._down()[expert] = part.weight
        if self._weights.down_scale is None:
            self._weights.down_scale = self._empty_scale(*part.scale.shape)
        self._weights.down_scale[expert] = part.scale

    def _halves(self) -> torch.Tensor:
        """[E, I, 2, H] of this rank: gate and up side by side."""
        inner = self._columns[1] - self._columns[0]
        if self._weights.gate_up.numel() == 0:
            self._weights.gate_up = self._empty(2 * inner, self._hidden)
        return self._weights.gate_up.view(self._num_experts, inner, 2, self._hidden)

    def _down(self) -> torch.Tensor:
        """[E, H, I] of this rank."""
        if self._weights.down.numel() == 0:
            self._weights.down = self._empty(self._hidden, self._columns[1] - self._columns[0])
        return self._weights.down

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        dtype = E4M3 if self._format == "fp8_block" else self._ops.dtype
        return torch.empty(self._num_experts, rows, columns, dtype=dtype, device=self._ops.device)

    def _empty_scale(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(self._num_experts, rows, columns, device=self._ops.device)
