"""What a step must at least read and compute, counted from the model's shapes: the floor under every measured time.

Weights: every tensor once, as it is kept on the device: GGUF blocks, e4m3 with its scales, else the model's dtype. The
token table is only looked up, so it counts as its rows; a head tied to it is read whole. Keys and values are counted
apart.
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
from tokenspeed.config.resolve import kv_bytes_per_token
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.loader.load import open_weights
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model
from tokenspeed.quantization.unquantized import Unquantized

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model's bytes and matrix sizes.

    Fields:
        weight_bytes: read by every step: all tensors but an untied token table.
        row_bytes: of the token table, read for each token.
        matrix_size: weights of the matrices that every token passes through (two operations each).
        head_size: weights of the head, which only the sampled rows pass through.
        kv_token_bytes: keys and values of one token in all layers.
        attention_width: layers x query heads x head_dim.
        multiplies_fp8: the layers' matrices multiply e4m3 numbers where there are many rows.
    """

    weight_bytes: int
    row_bytes: int
    matrix_size: int
    head_size: int
    kv_token_bytes: int
    attention_width: int
    multiplies_fp8: bool = False

    def decode_bytes(self, num_rows: int) -> int:
        """Weight bytes of a step with one token a row."""
        return self.weight_bytes + num_rows * self.row_bytes

    def kv_bytes(self, num_rows: int, context_len: int) -> int:
        """Keys and values that such a step reads."""
        return num_rows * context_len * self.kv_token_bytes

    def prefill_flop(self, num_prompts: int, prompt_len: int) -> int:
        """Operations of whole prompts with one sampled token each: matrices, causal attention, head."""
        pairs = prompt_len * (prompt_len + 1) // 2
        each = 2 * self.matrix_size * prompt_len + 4 * self.attention_width * pairs + 2 * self.head_size
        return num_prompts * each


def model_cost(config: EngineConfig) -> ModelCost:
    """Count a model. Builds it without loading anything; reads the headers of a GGUF file."""
    model = config.model
    shell = _shell(model)
    shapes = shell.expected_shapes()
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
        kv_token_bytes=kv_bytes_per_token(model, config.kv_cache_dtype),
        attention_width=model.num_layers * model.num_heads * model.head_dim,
        multiplies_fp8=bool(fp8) and not is_block,  # block scales are widened before a matmul
    )


def _is_fp8(name: str, config: EngineConfig) -> bool:
    """A matrix is kept in e4m3. On a CPU none is: no kernel multiplies them there."""
    module, quantization = name.removesuffix(".weight"), config.model.quantization
    if config.device == "cpu" or name == TOKEN_TABLE:
        return False
    if quantization is not None:
        return not quantization.is_ignored(module)
    return config.quantize_on_load == "fp8" and module.startswith("model.layers.")


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
    )
    backend, _ = select_backend(attention, "auto", ops)
    return build_model(model, SINGLE, Unquantized(ops, "only counted"), ops, backend)
