"""Startup timing records nest and survive errors; the log is configured once a process."""

from __future__ import annotations

import contextvars
import json
import logging
import time

import pytest

from tokenspeed.observability.logs import configure_logging
from tokenspeed.observability.startup import VARIABLE, count_compiles, startup_phase, unrecorded


@pytest.fixture
def records(caplog, monkeypatch):
    """Parsed records so far, when called."""
    monkeypatch.setenv(VARIABLE, "1")
    caplog.set_level(logging.INFO, logger="tokenspeed.startup")

    def read():
        return [json.loads(r.getMessage().removeprefix("startup_timing ")) for r in caplog.records]

    return read


def test_phases_nest_and_inherit(records):
    with startup_phase("outer", rank=0, role="target"):
        with startup_phase("inner"):
            pass
        with startup_phase("draft", role="draft"):
            pass
    found = records()
    assert [(r["phase"], r["event"]) for r in found] == [
        ("outer", "start"),
        ("inner", "start"),
        ("inner", "end"),
        ("draft", "start"),
        ("draft", "end"),
        ("outer", "end"),
    ]
    outer, inner, draft = found[0], found[1], found[3]
    assert outer["parent_id"] is None
    assert inner["parent_id"] == draft["parent_id"] == outer["span_id"]
    assert (inner["rank"], inner["role"], draft["rank"], draft["role"]) == (0, "target", 0, "draft")
    assert found[2]["span_id"] == inner["span_id"]
    assert all(r["status"] == "ok" and r["error_type"] is None and r["duration_s"] >= 0 for r in found if "status" in r)


def test_errors_pass_through_and_are_recorded(records):
    with pytest.raises(ZeroDivisionError), startup_phase("outer"), startup_phase("inner"):
        raise ZeroDivisionError
    with startup_phase("next"):
        pass
    ends = [r for r in records() if r["event"] == "end"]
    assert [(r["phase"], r["status"], r["error_type"]) for r in ends] == [
        ("inner", "error", "ZeroDivisionError"),
        ("outer", "error", "ZeroDivisionError"),
        ("next", "ok", None),
    ]
    assert ends[-1]["parent_id"] is None


def test_ends_say_what_was_compiled(records):
    totals = [3, 1.5]

    def count() -> None:
        with startup_phase("before"):
            pass
        count_compiles(lambda: (totals[0], totals[1]))
        with startup_phase("outer"):
            totals[:] = [5, 2.0]
            with startup_phase("inner"):
                totals[:] = [6, 4.0]

    contextvars.copy_context().run(count)
    ends = {r["phase"]: (r["triton_compiles"], r["triton_compile_s"]) for r in records() if r["event"] == "end"}
    assert ends == {"before": (None, None), "outer": (3, 2.5), "inner": (1, 2.0)}
    assert all("triton_compiles" not in r for r in records() if r["event"] == "start")


def test_a_rehearsal_is_not_recorded(records):
    with unrecorded(), startup_phase("weights.target"):
        pass
    with startup_phase("kv.build"):
        pass
    assert {record["phase"] for record in records()} == {"kv.build"}


def test_off_reads_no_clock(caplog, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(time, "perf_counter_ns", None)
    monkeypatch.setattr(time, "time_ns", None)
    caplog.set_level(logging.INFO, logger="tokenspeed.startup")
    with startup_phase("outer"):
        pass
    assert caplog.records == []


def test_log_lines_name_the_process(capsys):
    root, ours = logging.getLogger(), logging.getLogger("tokenspeed")
    before = root.handlers[:], root.level, ours.level
    try:
        configure_logging("info", "engine")
        logging.getLogger("tokenspeed.x").info("hello")
        logging.getLogger("tokenspeed.x").debug("hidden")
        logging.getLogger("somelib").info("hidden too")
        logging.getLogger("somelib").warning("heard")
    finally:
        root.handlers[:], level, our_level = before
        root.setLevel(level)
        ours.setLevel(our_level)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO engine tokenspeed.x: hello")
    assert second.endswith("WARNING engine somelib: heard")
