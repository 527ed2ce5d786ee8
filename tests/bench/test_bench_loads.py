"""What is sent and when: sessions, generators of data and of arrival times, all repeatable by their seed."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics

import pytest

from tokenspeed.bench.arrivals import arrival_times, constant, ramp
from tokenspeed.bench.contents import RandomIds, RandomText, count_tokens, load_backend
from tokenspeed.bench.datasets import (
    SHAREGPT_PROMPT,
    LogNormal,
    agent_sessions,
    random_sessions,
    shaped_sessions,
    sharegpt_sessions,
)
from tokenspeed.bench.sessions import Conversation, Session, Turn, join
from tokenspeed.protocol.errors import ConfigError


def ids(seed: int = 0) -> RandomIds:
    return RandomIds(32000, random.Random(seed))


# --- sessions ----------------------------------------------------------------------------------------------------


def test_a_conversation_grows_by_its_answers():
    conversation = Conversation(Session((Turn([1, 2], 4), Turn([3], 4)), opening=[9]))
    assert conversation.prompt() == [9, 1, 2]
    conversation.take([7, 7])
    assert conversation.prompt() == [9, 1, 2, 7, 7, 3]
    conversation.take([8])
    assert conversation.due is None


def test_the_same_as_messages():
    conversation = Conversation(Session((Turn("a", 4), Turn("b", 4)), opening="sys"))
    conversation.take("x")
    assert conversation.messages() == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "b"},
    ]
    assert conversation.prompt() == "sysaxb"


def test_text_and_ids_do_not_mix():
    assert join([]) == ""
    with pytest.raises(TypeError):
        join(["a", [1]])
    with pytest.raises(TypeError):
        Conversation(Session((Turn([1], 1),))).messages()


# --- data --------------------------------------------------------------------------------------------------------


def make_random(seed: int, **changes) -> list[Session]:
    lengths = {"input_len": 100, "output_len": 40, "range_ratio": 0.0, "prefix_len": 0} | changes
    return random_sessions(50, ids(seed), random.Random(seed), **lengths)


def test_random_lengths():
    assert {(len(s.turns[0].new), s.turns[0].output_len, s.opening) for s in make_random(0)} == {(100, 40, None)}
    spread = make_random(0, range_ratio=0.5)
    lengths = [len(session.turns[0].new) for session in spread]
    assert 50 <= min(lengths) < 80 and 120 < max(lengths) <= 150
    assert all(20 <= session.turns[0].output_len <= 60 for session in spread)


def test_random_prefix_is_shared_and_the_rest_is_not():
    sessions = make_random(0, prefix_len=7)
    assert len({tuple(session.opening) for session in sessions}) == 1
    assert len(sessions[0].opening) == 7
    assert len({tuple(session.turns[0].new) for session in sessions}) == len(sessions)


def test_a_seed_repeats_and_another_does_not():
    assert make_random(3, range_ratio=0.2) == make_random(3, range_ratio=0.2)
    assert make_random(3) != make_random(4)


@pytest.mark.parametrize(("vocab_size", "low"), [(32000, 1000), (320, 160), (2, 1)])
def test_ids_stay_inside_the_vocabulary(vocab_size, low):
    drawn = RandomIds(vocab_size, random.Random(0)).piece(2000)
    assert low <= min(drawn) and max(drawn) < vocab_size


def test_log_normal_has_the_median_and_percentile_it_is_given():
    generator = random.Random(0)
    drawn = sorted(LogNormal(400, 1000).draw(generator) for _ in range(20000))
    assert drawn[10000] == pytest.approx(400, rel=0.05)
    assert drawn[18000] == pytest.approx(1000, rel=0.05)


def test_shaped_sessions():
    sessions = shaped_sessions(400, ids(), random.Random(0), max_len=None, output_len=None)
    lengths = [len(session.turns[0].new) for session in sessions]
    assert statistics.median(lengths) == pytest.approx(SHAREGPT_PROMPT.median, rel=0.2)
    assert sessions == shaped_sessions(400, ids(), random.Random(0), max_len=None, output_len=None)
    short = shaped_sessions(20, ids(), random.Random(0), max_len=600, output_len=9)
    assert all(s.turns[0].output_len == 9 and len(s.turns[0].new) <= 591 for s in short)
    with pytest.raises(ConfigError, match="--max-model-len is 8"):
        shaped_sessions(20, ids(), random.Random(0), max_len=8, output_len=None)


def test_agent_sessions_share_the_system_prompt_only():
    sessions = agent_sessions(4, ids(), system_len=30, num_turns=3, turn_len=5, output_len=6)
    assert len({tuple(session.opening) for session in sessions}) == 1
    turns = [tuple(turn.new) for session in sessions for turn in session.turns]
    assert len(set(turns)) == len(turns) == 12
    assert {(len(session.opening), len(session.turns)) for session in sessions} == {(30, 3)}
    (bare,) = agent_sessions(1, ids(), system_len=0, num_turns=1, turn_len=5, output_len=6)
    assert bare.opening is None


# --- ShareGPT ----------------------------------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split())


def share(tmp_path, number: int, **changes) -> list[Session]:
    talks = [("q " * 10 * n, "a " * 5 * n) for n in (1, 2, 3)]
    talks += [("one two", "a " * 50), ("q " * 50, "b"), ("q " * 1100, "a " * 9), ("q " * 1000, "a " * 1200)]
    entries = [{"conversations": [{"value": q}, {"value": a}]} for q, a in talks]
    entries.append({"conversations": [{"value": "alone"}]})
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(entries))
    settings = {"output_len": None, "max_len": None, "skip_min_check": False} | changes
    return sharegpt_sessions(str(file), number, words, random.Random(0), **settings)


def lengths_of(sessions: list[Session]) -> list[tuple[int, int]]:
    return sorted((words(session.turns[0].new), session.turns[0].output_len) for session in sessions)


def test_sharegpt_keeps_what_is_neither_short_nor_long(tmp_path):
    assert lengths_of(share(tmp_path, 3)) == [(10, 5), (20, 10), (30, 15)]
    with pytest.raises(ConfigError, match=r"--num-prompts is 4, but .* has 3 usable conversations of 7"):
        share(tmp_path, 4)


def test_sharegpt_flags_change_what_is_kept(tmp_path):
    assert lengths_of(share(tmp_path, 5, skip_min_check=True))[0] == (2, 50)
    assert lengths_of(share(tmp_path, 4, output_len=7)) == [(10, 7), (20, 7), (30, 7), (50, 7)]
    assert (1100, 9) in lengths_of(share(tmp_path, 5, max_len=4000))
    assert lengths_of(share(tmp_path, 1, max_len=20)) == [(10, 5)]


@pytest.mark.parametrize("text", ["[", "{}x", '[{"conversations": [{"text": "a"}]}]', "[1]"])
def test_a_file_of_another_shape_is_named(tmp_path, text):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json is not ShareGPT's JSON"):
        sharegpt_sessions(
            str(file), 1, words, random.Random(0), output_len=None, max_len=None, skip_min_check=False
        )  # fmt: skip
    with pytest.raises(ConfigError, match="missing"):
        sharegpt_sessions(
            str(tmp_path / "missing"), 1, words, random.Random(0), output_len=None, max_len=None, skip_min_check=False
        )


def test_random_text_encodes_to_about_the_wanted_length(default_checkpoint):
    backend = load_backend(default_checkpoint.tokenizer_path)
    contents = RandomText(backend, random.Random(0))
    for length in (1, 20, 200):
        assert abs(count_tokens(backend, contents.piece(length)) - length) <= max(2, length // 20)


# --- arrivals ----------------------------------------------------------------------------------------------------


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_an_infinite_rate_is_at_once():
    assert arrival_times(5, constant(5, math.inf), 1.0, 0) == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_shape(burstiness):
    found = gaps(arrival_times(20001, constant(20001, 50.0), burstiness, 1))
    assert min(found) >= 0
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.02, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_arrivals_repeat_by_seed():
    assert arrival_times(9, constant(9, 3.0), 1.0, 7) == arrival_times(9, constant(9, 3.0), 1.0, 7)
    assert arrival_times(9, constant(9, 3.0), 1.0, 7) != arrival_times(9, constant(9, 3.0), 1.0, 8)


def test_ramps():
    assert ramp(5, 1.0, 9.0, "linear") == pytest.approx([1, 3, 5, 7, 9])
    assert ramp(5, 1.0, 16.0, "exponential") == pytest.approx([1, 2, 4, 8, 16])
    assert ramp(1, 2.0, 8.0, "linear") == [2.0]
    times = arrival_times(4000, ramp(4000, 1.0, 100.0, "linear"), 1.0, 0)
    assert times == sorted(times)
    assert statistics.fmean(gaps(times[:400])) > 3 * statistics.fmean(gaps(times[-400:]))
