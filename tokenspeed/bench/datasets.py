"""The loads of `bench serve`: random lengths, ShareGPT conversations, lengths shaped like ShareGPT's, agent sessions.

Each generator is a pure function of its arguments and a seeded generator: the same seed gives the same sessions.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.bench.contents import Contents
from tokenspeed.bench.sessions import Session, Turn
from tokenspeed.protocol.errors import ConfigError

# What serving benchmarks customarily drop from ShareGPT: conversations that say nothing or would dominate the run.
MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
P90 = 1.2815515655446004  # of the standard normal distribution


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths by a log-normal distribution given by its median and its 90th percentile."""

    median: float
    p90: float

    def draw(self, generator: random.Random) -> int:
        """One length, at least MIN_TOKENS."""
        sigma = math.log(self.p90 / self.median) / P90
        return max(MIN_TOKENS, round(generator.lognormvariate(math.log(self.median), sigma)))


# Medians and 90th percentiles of openchat_sharegpt4 in Sarathi-Serve (arXiv 2403.02310, table 2). The figures are
# theirs; that lengths are log-normal and independent of each other is our simplification.
SHAREGPT_PROMPT = LogNormal(1730, 5696)
SHAREGPT_OUTPUT = LogNormal(415, 834)


def random_sessions(
    number: int,
    contents: Contents,
    generator: random.Random,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
) -> list[Session]:
    """Single requests with lengths uniform in [len * (1 - ratio), len * (1 + ratio)], after a common prefix."""
    opening = contents.piece(prefix_len) if prefix_len else None
    return [
        Session(
            (
                Turn(
                    contents.piece(_spread(input_len, range_ratio, generator)),
                    _spread(output_len, range_ratio, generator),
                ),
            ),
            opening,
        )
        for _ in range(number)
    ]


def shaped_sessions(
    number: int, contents: Contents, generator: random.Random, *, max_len: int | None, output_len: int | None
) -> list[Session]:
    """Single requests of random content whose lengths are drawn like ShareGPT's. Synthetic: see SHAREGPT_PROMPT.

    Args:
        max_len: prompt and output together; longer ones are drawn again.
        output_len: a fixed output length instead.

    Raises:
        ConfigError: hardly any length fits `max_len`.
    """
    sessions: list[Session] = []
    for _ in range(1000 * number):
        if len(sessions) == number:
            break
        prompt = SHAREGPT_PROMPT.draw(generator)
        output = SHAREGPT_OUTPUT.draw(generator) if output_len is None else output_len
        if max_len is None or prompt + output <= max_len:
            sessions.append(Session((Turn(contents.piece(prompt), output),)))
    if len(sessions) < number:
        raise ConfigError(f"--max-model-len is {max_len}, and hardly any ShareGPT-shaped request fits; raise it")
    return sessions


def agent_sessions(
    number: int, contents: Contents, *, system_len: int, num_turns: int, turn_len: int, output_len: int
) -> list[Session]:
    """Sessions as agents have them: one system prompt for all, short new input a turn, answers kept in the prompt."""
    opening = contents.piece(system_len) if system_len else None
    return [
        Session(tuple(Turn(contents.piece(turn_len), output_len) for _ in range(num_turns)), opening)
        for _ in range(number)
    ]


def sharegpt_sessions(
    path: str,
    number: int,
    count: Callable[[str], int],
    generator: random.Random,
    *,
    output_len: int | None,
    max_len: int | None,
    skip_min_check: bool,
    render: Callable[[str], list[int]] | None = None,
) -> list[Session]:
    """First question and the length of its first answer, of conversations in ShareGPT's JSON, in random order.

    Args:
        path: a list of {"conversations": [{"value": text}, ...]}.
        count: tokens of a text.
        output_len: instead of the answer's own length.
        max_len: prompt and output together, instead of the customary limits (1024 and 2048).
        skip_min_check: keep conversations of fewer than 4 tokens.
        render: makes the prompt's token ids of a question; None = the question is the prompt.

    Raises:
        ConfigError: a file of another shape, or with fewer usable conversations than asked for.
    """
    pairs = _read_pairs(path)
    generator.shuffle(pairs)
    sessions: list[Session] = []
    for question, answer in pairs:
        if len(sessions) == number:
            break
        prompt = question if render is None else render(question)
        prompt_len = count(prompt) if isinstance(prompt, str) else len(prompt)
        wanted = count(answer) if output_len is None else output_len
        if not skip_min_check and (prompt_len < MIN_TOKENS or (output_len is None and wanted < MIN_TOKENS)):
            continue
        limit = MAX_TOTAL_TOKENS if max_len is None else max_len
        if prompt_len + wanted > limit or (max_len is None and prompt_len > MAX_PROMPT_TOKENS):
            continue
        if prompt_len and wanted:
            sessions.append(Session((Turn(prompt, wanted),)))
    if len(sessions) < number:
        raise ConfigError(
            f"--num-prompts is {number}, but {path} has {len(sessions)} usable conversations of {len(pairs)}; lower it"
        )
    return sessions


def _read_pairs(path: str) -> list[tuple[str, str]]:
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        said = [[str(part["value"]) for part in entry["conversations"]] for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--dataset-path {path} is not ShareGPT's JSON, a list of objects with `conversations`: "
            f"{type(error).__name__}: {error}"
        ) from error
    return [(values[0], values[1]) for values in said if len(values) >= 2]


def _spread(length: int, ratio: float, generator: random.Random) -> int:
    return max(1, generator.randint(math.ceil(length * (1 - ratio)), math.floor(length * (1 + ratio))))
