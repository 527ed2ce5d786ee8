"""Dates are days that there are."""

from __future__ import annotations

import datetime
import json
import random
import re

import pytest
from grammar_support import byte_backend, compiled, takes

from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.select import BACKENDS
from tokenspeed.protocol.errors import InvalidRequest

DAYS = ("2024-02-29", "2000-02-29", "2023-02-28", "1999-04-30", "2020-12-31", "0400-02-29", "9999-10-10")
NO_DAYS = (
    *("4080-04-31", "2023-02-29", "1900-02-29", "2100-02-29", "2024-02-30", "2020-13-01", "2020-00-10", "2020-01-00"),
    *("2020-01-32", "2020-06-31", "2020-09-31", "2020-11-31", "20-01-01", "2020-1-1"),
)
TIMES = ("00:00:00Z", "23:59:60Z", "12:30:05.123+01:00", "12:30:05-23:59")
NO_TIMES = (
    "24:00:00Z",
    "12:60:00Z",
    "12:30:61Z",
    "12:30:05",
    "12:30Z",
    "12:30:05.Z",
    "12:30:05+24:00",
    "12:30:05+0100",
)


@pytest.mark.parametrize("library", BACKENDS)
def test_dates_are_days_that_there_are(library: str):
    """The bug: with xgrammar every month had 31 days, so `format: date` gave 4080-04-31."""
    backend = byte_backend(library)

    def of(name: str):
        schema = {"type": "object", "properties": {"k": {"type": "string", "format": name}}, "required": ["k"]}
        return compiled(backend, "json_schema", json.dumps(rewrite_schema(schema, "x")))

    date, date_time = of("date"), of("date-time")
    for day in DAYS:
        assert takes(date, f'{{"k": "{day}"}}'), day
        assert takes(date_time, f'{{"k": "{day}T{TIMES[0]}"}}'), day
    for day in NO_DAYS:
        assert not takes(date, f'{{"k": "{day}"}}'), day
        assert not takes(date_time, f'{{"k": "{day}T{TIMES[0]}"}}'), day
    for time in TIMES:
        assert takes(date_time, f'{{"k": "{DAYS[0]}T{time}"}}'), time
    for time in (*NO_TIMES, ""):
        assert not takes(date_time, f'{{"k": "{DAYS[0]}T{time}"}}'), time
    assert not takes(date_time, f'{{"k": "{DAYS[0]}"}}')


def test_the_pattern_is_the_calendar():
    pattern = re.compile(rewrite_schema({"type": "string", "format": "date"}, "x")["pattern"])
    chance = random.Random(1)
    for year in (*range(1890, 2110), *(chance.randrange(1, 10_000) for _ in range(100))):
        for month, day in ((2, 28), (2, 29), (2, 30), (chance.randrange(14), chance.randrange(33))):
            try:
                datetime.date(year, month, day)
                is_day = True
            except ValueError:
                is_day = False
            assert bool(pattern.match(f"{year:04}-{month:02}-{day:02}")) == is_day, (year, month, day)


def test_a_date_is_still_a_format_beside_other_keywords():
    """So that the message names what the user wrote."""
    with pytest.raises(InvalidRequest, match="#/pattern: not together with format"):
        rewrite_schema({"type": "string", "format": "date", "pattern": "^a$"}, "x")
    assert "pattern" in rewrite_schema({"allOf": [{"format": "date"}, {"type": "string", "format": "date"}]}, "x")
