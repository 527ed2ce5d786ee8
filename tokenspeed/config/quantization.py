"""How a checkpoint's weights are quantized, from config.json or ModelOpt's hf_quant_config.json. No torch.

Three spellings of one thing, e4m3 weights with float32 scales, are read: `fp8`, `compressed-tensors` and `modelopt`;
and `mxfp4`, experts in E2M1 with a scale for 32 values (OCP MX 1.0). Everything else is refused by file, field and
value.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from tokenspeed.config.fields import Fields
from tokenspeed.protocol.errors import CheckpointError

Method = Literal["fp8", "compressed-tensors", "modelopt", "mxfp4"]
Granularity = Literal["tensor", "channel", "block", "group"]

BLOCK = 128

_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_IGNORE_FIELDS = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Quantized weights of a checkpoint: linears in e4m3, or (`mxfp4`) experts alone.

    Fields:
        method: whose spelling.
        granularity: what has a scale of its own: a tensor, an output channel, a block of 128 x 128, or (mxfp4) a group
            of 32 values in a row.
        activations: with a scale from the file (`static`), found at run time (`dynamic`), or not quantized (`none`);
            what the checkpoint was made for.
        ignored: modules that are not quantized: names, `*` patterns, or regular expressions after `re:`.
    """

    method: Method
    granularity: Granularity
    activations: Literal["static", "dynamic", "none"]
    ignored: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """For the log: `compressed-tensors checkpoint, a scale a channel, dynamic activations`."""
        what = {"block": "block of 128 x 128", "group": "group of 32"}.get(self.granularity, self.granularity)
        return f"of the {self.method} checkpoint, a scale a {what}, made for activations: {self.activations}"

    def is_ignored(self, module: str) -> bool:
        """The module, or every part of a merged one (`qkv_proj`, `gate_up_proj`), stays as it is."""
        parent, _, name = module.rpartition(".")
        return all(self._is_listed(f"{parent}.{part}" if parent else part) for part in _MERGED.get(name, (name,)))

    def _is_listed(self, module: str) -> bool:
        for listed in self.ignored:
            if listed.startswith("re:"):
                if re.match(listed[3:], module):
                    return True
            elif fnmatchcase(module, listed) or module.startswith(f"{listed}.") or module.endswith(f".{listed}"):
                return True
        return False


class Quantization(msgspec.Struct, frozen=True):
    """What a checkpoint says: of its weights, and of the KV cache it was made for."""

    weights: QuantizationConfig | None = None
    kv_cache_is_fp8: bool = False


def read_quantization(fields: Fields, modelopt: dict[str, Any] | None = None, where: str = "") -> Quantization:
    """
    Args:
        fields: config.json.
        modelopt: hf_quant_config.json, which lies at `where`, or None. config.json goes first.
    Raises:
        CheckpointError: a method or a value that is not read. Names file and field.
    """
    for name in ("quantization_config", "compression_config"):
        values = fields.get(name)
        if values is None:
            continue
        if not isinstance(values, dict):
            raise fields.bad(name, "an object")
        return _read(Fields(fields.where, values, f"{name}."))
    if modelopt is not None:
        values = modelopt.get("quantization")
        if not isinstance(values, dict):
            raise CheckpointError(f"{where}: quantization is {values!r}, expected an object")
        return _modelopt(Fields(where, values, "quantization."))
    return Quantization()


def _read(fields: Fields) -> Quantization:
    method = fields.get("quant_method")
    if method == "fp8":
        return Quantization(_fp8(fields))
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "modelopt":
        return _modelopt(fields)
    if method == "mxfp4":
        return Quantization(_mxfp4(fields))
    raise CheckpointError(
        f"{fields.where}: {fields.prefix.rstrip('.')} asks for {method!r}, which is not supported (fp8, "
        "compressed-tensors and modelopt are, with e4m3 weights, and mxfp4 for experts); "
        "use the model as first published or, if it has no experts, a GGUF file of it"
    )


def _fp8(fields: Fields) -> QuantizationConfig:
    if fields.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise fields.bad("fmt", "e4m3")
    activations = fields.get("activation_scheme")
    if activations not in (None, "static", "dynamic"):
        raise fields.bad("activation_scheme", "static or dynamic")
    granularity: Granularity = "tensor"
    if fields.get("weight_block_size") is not None:
        _require_block(fields, "weight_block_size")
        granularity = "block"
    return QuantizationConfig(
        method="fp8", granularity=granularity, activations=activations or "dynamic", ignored=_ignored(fields)
    )


def _mxfp4(fields: Fields) -> QuantizationConfig:
    """Experts in E2M1; whatever else the file has is in the model's dtype, which `modules_to_not_convert` repeats.

    Raises:
        CheckpointError: it names experts too: layers of different precision are not supported.
    """
    ignored = _ignored(fields)
    config = QuantizationConfig(method="mxfp4", granularity="group", activations="none", ignored=ignored)
    if config.is_ignored("model.layers.0.mlp.experts") or any(".mlp.experts" in name for name in ignored):
        raise fields.bad("modules_to_not_convert", "no experts in it: the experts of all layers are MXFP4")
    return config


def _compressed_tensors(fields: Fields) -> Quantization:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(next(iter(groups.values())), dict):
        raise fields.bad("config_groups", "one group: layers of different precision are not supported")
    ((name, values),) = groups.items()
    group = Fields(fields.where, values, f"{fields.prefix}config_groups.{name}.")
    if group.get("targets") not in (None, ["Linear"]):
        raise group.bad("targets", "['Linear']")
    weights = _float8(group, "weights")
    if weights is None:
        raise group.missing("weights", "8-bit floats")
    strategies: dict[str, Granularity] = {"tensor": "tensor", "channel": "channel", "block": "block"}
    strategy = weights.get("strategy")
    if strategy not in strategies:
        raise weights.bad("strategy", "tensor, channel or block")
    if strategy == "block":
        _require_block(weights, "block_structure")
    inputs = _float8(group, "input_activations")
    activations: Literal["static", "dynamic", "none"] = "none"
    if inputs is not None:
        activations = "dynamic" if inputs.flag("dynamic", False) else "static"
    return Quantization(
        QuantizationConfig(
            method="compressed-tensors",
            granularity=strategies[strategy],
            activations=activations,
            ignored=_ignored(fields),
        ),
        _float8(fields, "kv_cache_scheme") is not None,
    )


def _modelopt(fields: Fields) -> Quantization:
    kv = fields.get("kv_cache_quant_algo")
    if kv not in (None, "FP8"):
        raise fields.bad("kv_cache_quant_algo", "FP8 or none")
    kv_is_fp8 = kv == "FP8" or _float8(fields, "kv_cache_scheme") is not None
    algorithm = fields.get("quant_algo")
    if algorithm is None and kv_is_fp8:
        return Quantization(None, True)
    if algorithm != "FP8":
        raise fields.bad("quant_algo", "FP8")
    weights = QuantizationConfig(
        method="modelopt", granularity="tensor", activations="static", ignored=_ignored(fields)
    )
    return Quantization(weights, kv_is_fp8)


def _float8(fields: Fields, name: str) -> Fields | None:
    """One of compressed-tensors' descriptions of a tensor, or None when it is absent."""
    values = fields.get(name)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise fields.bad(name, "an object")
    described = Fields(fields.where, values, f"{fields.prefix}{name}.")
    if described.get("num_bits") != 8:
        raise described.bad("num_bits", "8")
    if described.get("type") != "float":
        raise described.bad("type", "float")
    return described


def _require_block(fields: Fields, name: str) -> None:
    if fields.get(name) != [BLOCK, BLOCK]:
        raise fields.bad(name, f"[{BLOCK}, {BLOCK}]")


def _ignored(fields: Fields) -> tuple[str, ...]:
    found: list[str] = []
    for name in _IGNORE_FIELDS:
        listed = fields.get(name)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise fields.bad(name, "a list of module names")
        found += listed
    for item in found:
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except re.error as error:
                raise CheckpointError(f"{fields.where}: {item!r} is not a regular expression: {error}") from error
    return tuple(found)
