"""Model families, found by walking this package: a family's file carries `ARCHITECTURES` and an `EXAMPLE` config."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import tokenspeed.models
from tokenspeed.attention.interface import AttentionBackend
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.models.interface import Model
from tokenspeed.moe.select import SelectedMoe
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import Scheme

Build = Callable[[ModelConfig, Mesh, Scheme, Ops, AttentionBackend, SelectedMoe | None], Model]


def discover() -> dict[str, Build]:
    """HF architecture name -> its class."""
    found: dict[str, Build] = {}
    for module in pkgutil.iter_modules(tokenspeed.models.__path__, "tokenspeed.models."):
        found.update(getattr(importlib.import_module(module.name), "ARCHITECTURES", {}))
    return found


def examples() -> list[ModelConfig]:
    """The tiny example config of every family, for contract tests."""
    modules = pkgutil.iter_modules(tokenspeed.models.__path__, "tokenspeed.models.")
    found = (getattr(importlib.import_module(module.name), "EXAMPLE", None) for module in modules)
    return [example for example in found if example is not None]


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    scheme: Scheme,
    ops: Ops,
    attention_backend: AttentionBackend,
    moe: SelectedMoe | None = None,
) -> Model:
    """A model with nothing loaded.

    Args:
        moe: what runs the experts; required where the config has expert layers.

    Raises:
        CheckpointError: no family has this architecture (the message names those that exist), or the config contradicts
            its family.
        ConfigError: the mesh cannot be served.
    """
    families = discover()
    if config.architecture not in families:
        raise CheckpointError(
            f"architecture {config.architecture!r} is not supported; supported are: {', '.join(sorted(families))}"
        )
    return families[config.architecture](config, mesh, scheme, ops, attention_backend, moe)
