"""Which steps a start on a GPU goes through before the first request: all that stand for others, or a few of them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from compile_support import CONFIG

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.config.engine import EngineConfig
from tokenspeed.runner import build_cuda
from tokenspeed.runner.cuda_runner import GraphPlan
from tokenspeed.runner.loaded import LoadedModel
from tokenspeed.runner.warm_up import checking_plans, warm_up_plans

ALL = warm_up_plans(160, 4096, 8192, 64)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """How many steps the runner is told to go through."""

    def count(takes_orders: bool, is_listed: bool, has_loaded_all: bool, num_met_in_trial: int) -> int:
        monitor = types.SimpleNamespace(install=lambda: None, totals=lambda: (0, 0.0), num_met=7, serving=lambda: None)
        waited: list[bool] = []
        job = types.SimpleNamespace(
            takes_orders=takes_orders,
            has_loaded_all=has_loaded_all,
            wait=lambda is_listed, _: waited.append(is_listed),
            order=lambda _: None,
        )
        loaded = LoadedModel(model=None, ops=None, backend=None, report=[])  # type: ignore[arg-type]
        group = GroupSpec("full", "full", 64, 2**20, 500)
        asked: list[GraphPlan] = []

        order: list[str] = []

        def measure(_: EngineConfig) -> None:
            order.append("measured")

        def listed(*_: object) -> bool:
            order.append("listed")
            return is_listed

        def size(*_: object) -> list[GroupSpec]:
            monitor.num_met += num_met_in_trial
            return [group]

        parts: dict[str, Any] = {
            "CompileMonitor": lambda _: monitor,
            "count_compiles": lambda _: None,
            "build_compiler": lambda _: (None, ""),
            "start_compile": lambda *_: contextlib.nullcontext(job),
            "list_kernels": listed,
            "WeightRoom": measure,
            "load": lambda *_: order.append("loaded") or loaded,
            "release": lambda: None,
            "_size": size,
            "bind_pool": lambda *_: None,
            "_runner": lambda config, loaded, groups, graphs, grammars: asked.append(graphs),
        }
        for name, part in parts.items():
            monkeypatch.setattr(build_cuda, name, part)
        build_cuda.build_cuda_runner(CONFIG, None)
        assert order == ["listed"] * takes_orders + ["measured", "loaded"], "the twin takes memory as well"
        assert waited == [is_listed], "only then is the cache marked as complete"
        return len(asked[0].warm_up)

    return count


def test_a_few_are_of_every_kind() -> None:
    kinds = {(len(plan.rows) > 1, plan.rows[0].num_tokens > 1) for plan in checking_plans(ALL)}
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}
    assert len(checking_plans(ALL)) <= len(ALL) // 6


def test_where_all_kernels_are_loaded_a_few_steps_are_enough(plans: Callable[..., int]) -> None:
    assert plans(True, True, True, 0) == len(checking_plans(ALL))


@pytest.mark.parametrize(
    "state",
    [
        (False, False, False, 0),
        (True, False, True, 0),
        (True, True, False, 0),
        (True, True, True, 1),
    ],
    ids=["compiled before", "not listed", "not loaded", "missed by the list"],
)
def test_else_all_are_gone_through(plans: Callable[..., int], state: tuple[bool, bool, bool, int]) -> None:
    """Compiled before: they are on the disk, and nothing has loaded them yet."""
    assert plans(*state) == len(ALL)
