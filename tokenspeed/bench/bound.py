"""What a step must at least read and compute, counted from the model's shapes: the floor under every measured time.

Weights: every tensor once, as it is kept on the device: GGUF blocks, e4m3 or E2M1 with their scales, else the model's
dtype. The token table is only looked up, so it counts as its rows; a head tied to it is read whole. Of E experts with k
chosen a token, a layer reads as many as T tokens hit when each takes any k of them:  E (1 - (1 - k / E) ** T).
Keys and values are counted apart; a layer with a window reads no more than the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tokenspeed.attention.interface import AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.quantization import BLOCK
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.loader.load import open_weights
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.quantization.unquantized import Unquantized

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
TOKEN_TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERTS = ".mlp.experts."
"""In the name of every tensor of experts, whatever the layout."""
MXFP4_BYTES = 17 / 32
"""Of a weight: 4 bits, and a byte of scale for 32 of them."""


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """The experts of all sparse layers together.

    Fields:
        expert_bytes: of one expert a layer. expert_size: weights of its matrices.
    """

    num_experts: int
    top_k: int
    expert_bytes: int
    expert_size: int

    def num_hit(self, num_tokens: int) -> float:
        """Experts of a layer that so many tokens are expected to read."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model's bytes and matrix sizes.

    Fields:
        weight_bytes: read by every step: all tensors but experts and an untied token table.
        row_bytes: of the token table, read for each token.
        matrix_size: weights of the matrices that every token passes through (two operations each), experts aside.
        head_size: weights of the head, which only the sampled rows pass through.
        layer_token_bytes: keys and values of one token in one layer.
        layer_windows: for each layer the tokens that a query sees; None = all.
        layer_width: query heads x head_dim of a layer.
        experts: of sparse layers, or None when every layer is dense.
        multiplies_fp8: the layers' matrices multiply e4m3 numbers where there are many rows.
    """

    weight_bytes: int
    row_bytes: int
    matrix_size: int
    head_size: int
    layer_token_bytes: int
    layer_windows: tuple[int | None, ...]
    layer_width: int
    experts: ExpertCost | None = None
    multiplies_fp8: bool = False

    @property
    def total_bytes(self) -> int:
        """Everything that is kept, but for an untied token table."""
        experts = self.experts
        return self.weight_bytes + (0 if experts is None else experts.num_experts * experts.expert_bytes)

    def step_bytes(self, num_tokens: int) -> int:
        """Weight bytes of a step of so many tokens."""
        experts = self.experts
        hit = 0 if experts is None else round(experts.num_hit(num_tokens) * experts.expert_bytes)
        return self.weight_bytes + num_tokens * self.row_bytes + hit

    def kv_bytes(self, num_rows: int, context_len: int) -> int:
        """Keys and values that a step with one token a row reads."""
        seen = sum(min(context_len, window or context_len) for window in self.layer_windows)
        return num_rows * seen * self.layer_token_bytes

    def prefill_flop(self, num_prompts: int, prompt_len: int) -> int:
        """Operations of whole prompts with one sampled token each: matrices, causal attention, head."""
        experts = self.experts
        active = 0 if experts is None else experts.top_k * experts.expert_size
        pairs = sum(_num_pairs(prompt_len, window) for window in self.layer_windows)
        each = 2 * (self.matrix_size + active) * prompt_len + 4 * self.layer_width * pairs + 2 * self.head_size
        return num_prompts * each


def _num_pairs(length: int, window: int | None) -> int:
    """Of a query and a key that it sees: position i sees min(i + 1, window)."""
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def model_cost(config: EngineConfig) -> ModelCost:
    """Count a model. Builds it without loading anything; reads the headers of a GGUF file."""
    model = config.model
    shell = _shell(model)
    shapes = {name: shape for name, shape in shell.expected_shapes().items() if EXPERTS not in name}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    element_bytes = DTYPE_BYTES[config.dtype]
    stored = {name: size * element_bytes for name, size in sizes.items()}
    if config.load_format == "gguf":
        stored |= {weight.name: weight.nbytes for weight in open_weights(config.checkpoint, model, shell)}
    fp8 = {name: shape for name, shape in shapes.items() if len(shape) == 2 and _is_fp8(name, config)}
    is_block = model.quantization is not None and model.quantization.granularity == "block"
    stored |= {name: _fp8_bytes(shape[0], shape[1], is_block) for name, shape in fp8.items()}
    table_name = HEAD if HEAD in sizes else TOKEN_TABLE
    is_matrix = [name for name, shape in shapes.items() if len(shape) == 2 and name not in (TOKEN_TABLE, HEAD)]
    return ModelCost(
        weight_bytes=sum(stored[name] for name in sizes if HEAD not in sizes or name != TOKEN_TABLE),
        row_bytes=model.hidden_size * element_bytes,
        matrix_size=sum(sizes[name] for name in is_matrix),
        head_size=sizes[table_name],
        layer_token_bytes=2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[config.kv_cache_dtype],
        layer_windows=model.layer_windows or (None,) * model.num_layers,
        layer_width=model.num_heads * model.head_dim,
        experts=_expert_cost(config),
        multiplies_fp8=bool(fp8) and not is_block,  # block scales are widened before a matmul
    )


def _expert_cost(config: EngineConfig) -> ExpertCost | None:
    """Gate, up and down of an expert with their biases, as they are kept."""
    model, moe = config.model, config.model.moe
    if moe is None or len(moe.dense_layers) == model.num_layers:
        return None
    layers = [layer for layer in range(model.num_layers) if layer not in moe.dense_layers]
    hidden, inner = model.hidden_size, moe.intermediate_size
    element_bytes = DTYPE_BYTES[config.dtype]
    size = 3 * hidden * inner
    if model.quantization is not None and model.quantization.method == "mxfp4":
        nbytes = int(size * MXFP4_BYTES)
    elif _is_fp8(f"model.layers.{layers[0]}{EXPERTS}0.gate_proj", config) and _has_blocks(config):
        nbytes = 2 * _fp8_bytes(inner, hidden, is_block=True) + _fp8_bytes(hidden, inner, is_block=True)
    else:
        nbytes = size * element_bytes
    if moe.expert_bias:
        nbytes += (2 * inner + hidden) * element_bytes
    return ExpertCost(moe.num_experts, moe.top_k, len(layers) * nbytes, len(layers) * size)


def _is_fp8(name: str, config: EngineConfig) -> bool:
    """A matrix is kept in e4m3. On a CPU none is, nor on a GPU without: no kernel multiplies them there."""
    module, quantization = name.removesuffix(".weight"), config.model.quantization
    if config.device == "cpu" or not config.has_e4m3 or name == TOKEN_TABLE:
        return False
    if quantization is not None and quantization.method == "mxfp4":
        return False  # experts alone
    if quantization is not None:
        return not quantization.is_ignored(module)
    return config.quantize_on_load == "fp8" and module.startswith("model.layers.")


def _has_blocks(config: EngineConfig) -> bool:
    """Experts have a scale a block. Those of a checkpoint with other scales are widened."""
    return config.model.quantization is None or config.model.quantization.granularity == "block"


def _fp8_bytes(rows: int, columns: int, is_block: bool) -> int:
    """e4m3 weights and their float32 scales, one a row or one a block."""
    num_scales = -(-rows // BLOCK) * -(-columns // BLOCK) if is_block else rows
    return rows * columns + 4 * num_scales


def _shell(model: ModelConfig) -> Model:
    """The model with nothing in it, for its tensors' names and shapes: reference operations, so it builds anywhere."""
    need = Need(torch.device("cpu"), torch.float32)
    ops, _ = select_ops(need, only="reference")
    attention = AttentionNeed(
        device="cpu",
        dtype=need.dtype,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=16,
        window=min((window for window in model.layer_windows if window is not None), default=None),
        has_sinks=model.attention_sinks,
        logit_cap=model.attention_logit_cap,
    )
    backend, _ = select_backend(attention, "auto", ops)
    scheme = Unquantized(ops, "only counted")
    moe = None
    if model.moe is not None:
        moe, _ = select_moe(moe_need(model, SINGLE, scheme.expert_format, ops), "auto", ops)
    return build_model(model, SINGLE, scheme, ops, backend, moe)
