"""Loads a checkpoint into a model in three steps: read headers, compare everything, then bring the bytes.

Nothing is allocated before all names, shapes, types and file lengths have been found right. May be added here: another
source of tensors. Not here: what a layer does with a tensor (its load rule) and where files come from (checkpoint/).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.gguf_file import read_gguf
from tokenspeed.checkpoint.safetensors_file import read_safetensors
from tokenspeed.config.model import ModelConfig
from tokenspeed.loader.dummy_quantized import dummy_weight
from tokenspeed.loader.fp8_weights import pair_fp8, without_kv_scales
from tokenspeed.loader.gguf_names import CONFIG_TENSORS, query_or_key
from tokenspeed.loader.weight_stream import WeightStream
from tokenspeed.loader.weights import CheckpointWeight, GGUFWeight, SafetensorsWeight, llama_row_order
from tokenspeed.models.interface import LoadRule, Model
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.errors import CheckpointError

SHOWN = 5
"""Tensors named in one error; more are counted."""

logger = logging.getLogger(__name__)


def _take_all(weights: Sequence[CheckpointWeight]) -> None:
    """For models that any device has room for."""


def load_model(
    model: Model,
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    seed: int = 0,
    progress: bool = True,
    approve: Callable[[Sequence[CheckpointWeight]], None] = _take_all,
) -> None:
    """Fill `model` and finish it.

    Args:
        seed: of the random weights when the checkpoint has none (load format dummy).
        progress: show a bar on standard error, when that is a terminal.
        approve: called with the tensors that will be read, before the first is; raises where they have no room.

    Raises:
        CheckpointError: a file that is missing, damaged or cut off; a tensor that is missing, not expected, or of a
            wrong shape or type. Names file, tensor and expectation; raised before any weight is read.
    """
    started = time.perf_counter()
    weights = open_weights(checkpoint, config, model, seed)
    matched = match(model, weights, checkpoint)
    approve([weight for _, weight in matched])
    total_bytes = sum(weight.nbytes for _, weight in matched)
    with (
        startup_phase("weights.read_copy"),
        _progress_bar(total_bytes, progress and sys.stderr.isatty()) as bar,
        closing(WeightStream([weight.span for _, weight in matched if weight.span is not None])) as stream,
    ):
        for rule, weight in matched:
            weight.stream = stream
            rule(weight)
            bar.advance(weight.nbytes)
    with startup_phase("weights.postprocess"):
        model.finish()
    logger.info("loaded %d tensors (%.1f MB) in %.2f s", len(matched), total_bytes / 1e6, time.perf_counter() - started)


def open_weights(checkpoint: Checkpoint, config: ModelConfig, model: Model, seed: int = 0) -> list[CheckpointWeight]:
    """The checkpoint's tensors from its headers alone, in file order.

    Raises:
        CheckpointError: a file that is missing, damaged or cut off, or the same tensor in two files.
    """
    if checkpoint.format == "config":
        shapes, raw = model.expected_shapes(), model.raw_names()
        return [dummy_weight(name, shape, seed, config.quantization, name in raw) for name, shape in shapes.items()]
    weights: list[CheckpointWeight] = []
    if checkpoint.format == "gguf":
        for path in checkpoint.weight_files:
            weights += _gguf_weights(path, config)
    else:
        weights += _safetensors_weights(checkpoint, config)
    first: dict[str, CheckpointWeight] = {}
    for weight in weights:
        if weight.name in first:
            raise CheckpointError(f"{weight.where} is also in {first[weight.name].where}; expected it once")
        first[weight.name] = weight
    return weights


def _safetensors_weights(checkpoint: Checkpoint, config: ModelConfig) -> list[CheckpointWeight]:
    stored = [SafetensorsWeight(path, entry) for path in checkpoint.weight_files for entry in read_safetensors(path)]
    stored = without_kv_scales(stored)
    if config.quantization is None or config.quantization.method == "mxfp4":
        return [*stored]
    return pair_fp8(stored, config.quantization)


def _gguf_weights(path: str, config: ModelConfig) -> list[CheckpointWeight]:
    file = read_gguf(path)
    orders: dict[str, torch.Tensor] = {}
    if config.architecture == "LlamaForCausalLM":
        orders["q"] = llama_row_order(config.num_heads, config.head_dim)
        orders["k"] = llama_row_order(config.num_kv_heads, config.head_dim)
    return [
        GGUFWeight(path, tensor, orders.get(query_or_key(tensor.name) or ""))
        for tensor in file.tensors
        if tensor.name not in CONFIG_TENSORS
    ]


def match(
    model: Model, weights: list[CheckpointWeight], checkpoint: Checkpoint
) -> list[tuple[LoadRule, CheckpointWeight]]:
    """Each wanted tensor with its rule, in file order.

    Raises:
        CheckpointError: see `load_model`. Missing, then unexpected, then misshaped or unreadable tensors.
    """
    rules, shapes = model.load_rules(), model.expected_shapes()
    files = ", ".join(checkpoint.weight_files[:SHOWN]) + (" ..." if len(checkpoint.weight_files) > SHOWN else "")
    found = {weight.name for weight in weights}
    missing = [f"{name} {list(shapes[name])}" for name in rules if name not in found]
    if missing:
        raise CheckpointError(f"{files}: {_some(missing, 'missing tensor')}; expected by {_described(checkpoint)}")
    unexpected = [weight.where for weight in weights if weight.name not in rules and not model.ignorable(weight.name)]
    if unexpected:
        raise CheckpointError(f"{_some(unexpected, 'unexpected tensor')}; not part of {_described(checkpoint)}")
    matched = [(rules[weight.name], weight) for weight in weights if weight.name in rules]
    wrong = [
        f"{weight.where} has shape {list(weight.shape)}, expected {list(shapes[weight.name])}"
        for _, weight in matched
        if weight.shape != shapes[weight.name]
    ]
    if wrong:
        raise CheckpointError(f"{_some(wrong, 'wrong shape')}; expected by {_described(checkpoint)}")
    raw = model.raw_names()
    unreadable = [f"{weight.where} has {weight.unreadable}" for _, weight in matched if weight.unreadable]
    unreadable += [
        f"{weight.where} holds {'bytes, expected numbers' if weight.is_raw else 'numbers, expected bytes (U8)'}"
        for _, weight in matched
        if weight.unreadable is None and weight.is_raw != (weight.name in raw)
    ]
    if unreadable:
        raise CheckpointError(_some(unreadable, "unsupported type"))
    return matched


def _described(checkpoint: Checkpoint) -> str:
    return f"the model described by {checkpoint.config_path}"


def _some(items: list[str], what: str) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{what}{'s' if len(items) > 1 else ''}: {'; '.join(items[:SHOWN])}{more}"


class _Bar:
    """Advances a rich task, or nothing."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress = progress
        self._task = progress.add_task("loading weights", total=total_bytes) if progress is not None else None

    def advance(self, num_bytes: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, num_bytes)


@contextmanager
def _progress_bar(total_bytes: int, is_shown: bool) -> Iterator[_Bar]:
    if not is_shown:
        yield _Bar(None, total_bytes)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, total_bytes)
