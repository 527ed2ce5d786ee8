"""`tokenspeed bench serve`: a load on an OpenAI-compatible server, and what its clients saw.

Waits for the server, makes the sessions, warms up, runs the load, prints tables and one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokenspeed.bench.arrivals import Strategy, arrival_times, constant, ramp
from tokenspeed.bench.contents import Contents, RandomIds, RandomText, chat_prompt, count_tokens, load_backend
from tokenspeed.bench.datasets import agent_sessions, random_sessions, shaped_sessions, sharegpt_sessions
from tokenspeed.bench.http_client import RequestResult, find_model, open_session, stream_request
from tokenspeed.bench.load import run_load
from tokenspeed.bench.serve_args import ServeArgs, parse_serve, read_timeouts
from tokenspeed.bench.serve_report import as_json, details, save, show
from tokenspeed.bench.server_profile import Trace, profiled
from tokenspeed.bench.sessions import Conversation, Piece, Session
from tokenspeed.bench.stats import summarize
from tokenspeed.protocol.errors import ConfigError

EXIT_OK, EXIT_ALL_FAILED = 0, 1
WARMUP_SEED = 2**32


def run(argv: Sequence[str]) -> int:
    """Measure a server.

    Returns:
        0, or 1 when no request was completed.
    Raises:
        ConfigError, CheckpointError: for the user, in one line.
    """
    return asyncio.run(_run(parse_serve(argv)))


async def _run(args: ServeArgs) -> int:
    timeouts, total_s = read_timeouts()
    async with open_session(args.headers, timeouts, args.insecure) as http:
        model = await _model(http, args)
        name = args.served_model_name or model
        sessions, warmups = make_sessions(args, model)
        sender = Sender(http, args, name)
        if warmups:
            await run_load(warmups, [0.0] * len(warmups), sender.send, sender.answer, args.max_concurrency, _nothing)
        arrivals = _arrivals(args, len(sessions))
        async with _profile(http, args) as trace:
            results, duration_s = await _measure(args, sessions, arrivals, sender, total_s)
    summary = summarize(results, duration_s, args.metric_percentiles, args.goodput_ms)
    result = as_json(args, name, summary)
    if trace is not None:
        if trace.error is None:
            print(f"profiled; trace on the server: {trace.file or 'where it keeps them'}")
        result |= {"profile_file": trace.file, "profile_error": trace.error}
    show(args, name, summary)
    if args.save_result or args.append_result:
        path = save(args, result | (details(results) if args.save_detailed else {}))
        print(f"saved to {path}")
    print(json.dumps(result), flush=True)
    return EXIT_OK if summary.completed else EXIT_ALL_FAILED


async def _measure(
    args: ServeArgs, sessions: list[Session], arrivals: list[float], sender: Sender, total_s: float
) -> tuple[list[RequestResult], float]:
    """The results, and the seconds from the first request on.

    Raises:
        ConfigError: it takes longer than `total_s`.
    """
    try:
        with _progress(args, sum(len(session.turns) for session in sessions)) as advance:
            async with asyncio.timeout(total_s):
                started_s = time.perf_counter()
                results = await run_load(sessions, arrivals, sender.send, sender.answer, args.max_concurrency, advance)
                return results, time.perf_counter() - started_s
    except TimeoutError as error:
        raise ConfigError(
            f"the run did not end within {total_s:g} s; lower --num-prompts or raise TOKENSPEED_BENCH_TOTAL_TIMEOUT_SEC"
        ) from error


def _profile(http: aiohttp.ClientSession, args: ServeArgs) -> AbstractAsyncContextManager[Trace | None]:
    """Around the measured load; None unless `--profile` was given."""
    if not args.profile:
        return nullcontext()
    return profiled(http, args.url, num_steps=args.profile_num_steps, activities=args.profile_activities)


class Sender:
    """Makes the body of a conversation's due turn and sends it."""

    def __init__(self, http: aiohttp.ClientSession, args: ServeArgs, model: str) -> None:
        self._http = http
        self._args = args
        self._model = model
        self._url = args.url + args.path
        self._wants_ids = args.backend == "tokenspeed"
        self._num_sent = 0

    async def send(self, number: int, conversation: Conversation) -> RequestResult:
        """See `load.Send`. Names stay unique over warm-ups too."""
        self._num_sent += 1
        name = f"{self._args.request_id_prefix}{self._num_sent - 1}"
        return await stream_request(self._http, self._url, self.body(conversation), {"X-Request-Id": name})

    def answer(self, result: RequestResult) -> Piece:
        """The answer as a piece of the next prompt."""
        return result.token_ids if self._wants_ids else result.text

    def body(self, conversation: Conversation) -> dict[str, Any]:
        """The request's JSON."""
        args = self._args
        assert conversation.due is not None
        length = conversation.due.output_len
        body: dict[str, Any] = {"model": self._model}
        if args.is_chat:
            body |= {"messages": conversation.messages(), "max_completion_tokens": length}
        else:
            body |= {"prompt": conversation.prompt(), "max_tokens": length}
        body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        if not args.disable_ignore_eos:
            body["ignore_eos"] = True
        if args.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": args.logprobs} if args.is_chat else {"logprobs": args.logprobs}
        if self._wants_ids:
            body["return_token_ids"] = True
        return body | (args.extra_body or {})


def make_sessions(args: ServeArgs, model: str) -> tuple[list[Session], list[Session]]:
    """The sessions of the load, and those of the warm-up (single turns, of content of their own).

    Args:
        model: whose tokenizer is taken when none was named.

    Raises:
        ConfigError: a dataset that needs a tokenizer that may not or cannot be loaded, or lengths above the limit.
    """
    generator = random.Random(args.seed)
    if args.dataset_name == "sharegpt":
        assert args.dataset_path is not None
        name = _tokenizer_name(args, model)
        backend = load_backend(name)
        found = sharegpt_sessions(
            args.dataset_path,
            args.num_prompts + args.num_warmups,
            partial(count_tokens, backend),
            generator,
            output_len=args.output_len or args.sharegpt_output_len,
            max_len=args.max_model_len,
            skip_min_check=args.skip_min_tokens_check,
            render=chat_prompt(name) if args.apply_chat_template else None,
        )
        return found[: args.num_prompts], found[args.num_prompts :]
    sends_ids = not args.is_chat and not (args.dataset_name == "multi-turn" and args.backend == "openai")
    tokenizer = None if sends_ids else load_backend(_tokenizer_name(args, model))

    def contents(source: random.Random) -> Contents:
        if tokenizer is None:
            return RandomIds(args.random_vocab_size, source)
        return RandomText(tokenizer, source)

    _check_lengths(args)
    warming = random.Random(args.seed + WARMUP_SEED)
    warmups = _synthetic(args, args.num_warmups, contents(warming), warming) if args.num_warmups else []
    sessions = _synthetic(args, args.num_prompts, contents(generator), generator)
    return sessions, [Session(session.turns[:1], session.opening) for session in warmups[: args.num_warmups]]


def _synthetic(args: ServeArgs, num_requests: int, contents: Contents, generator: random.Random) -> list[Session]:
    if args.dataset_name == "random":
        return random_sessions(
            num_requests,
            contents,
            generator,
            input_len=args.input_len or args.random_input_len,
            output_len=args.output_len or args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        )
    if args.dataset_name == "sharegpt-shaped":
        output_len = args.output_len or args.sharegpt_output_len
        return shaped_sessions(num_requests, contents, generator, max_len=args.max_model_len, output_len=output_len)
    return agent_sessions(
        -(-num_requests // args.num_turns),
        contents,
        system_len=args.system_len,
        num_turns=args.num_turns,
        turn_len=args.turn_len,
        output_len=args.output_len or args.random_output_len,
    )


def _check_lengths(args: ServeArgs) -> None:
    """`--max-model-len` of datasets whose lengths are given: nothing can be left out of them."""
    if args.max_model_len is None or args.dataset_name == "sharegpt-shaped":
        return
    output_len = args.output_len or args.random_output_len
    if args.dataset_name == "multi-turn":
        longest = args.system_len + args.num_turns * (args.turn_len + output_len)
    else:
        growing = (args.input_len or args.random_input_len) + output_len
        longest = args.random_prefix_len + int(growing * (1 + args.random_range_ratio))
    if longest > args.max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens, --max-model-len is {args.max_model_len}; lower the lengths"
        )


def _tokenizer_name(args: ServeArgs, model: str) -> str:
    if args.skip_tokenizer_init:
        raise ConfigError(
            f"--dataset-name {args.dataset_name} with --backend {args.backend} sends text and needs a tokenizer; leave "
            "--skip-tokenizer-init out, or send token ids (random with --backend openai or tokenspeed)"
        )
    return args.tokenizer or model


async def _model(http: aiohttp.ClientSession, args: ServeArgs) -> str:
    """The model to ask for; waits for the server unless told not to."""
    if args.model is not None and args.ready_check_timeout_sec == 0:
        return args.model

    def say(answer: str) -> None:
        limit = f"{args.ready_check_timeout_sec:g} s (--ready-check-timeout-sec)"
        print(f"waiting up to {limit} for the server at {args.url}: {answer}", file=sys.stderr)

    try:
        found = await find_model(http, args.url, args.ready_check_timeout_sec, on_wait=say)
    except TimeoutError as error:
        raise ConfigError(f"{error}; start the server, or raise --ready-check-timeout-sec") from error
    return args.model or found


def _arrivals(args: ServeArgs, number: int) -> list[float]:
    if args.ramp_up_strategy is None:
        rates = constant(number, args.request_rate)
    else:
        assert args.ramp_up_start_rps is not None and args.ramp_up_end_rps is not None
        rates = ramp(number, args.ramp_up_start_rps, args.ramp_up_end_rps, cast("Strategy", args.ramp_up_strategy))
    return arrival_times(number, rates, args.burstiness, args.seed)


def _nothing(result: RequestResult) -> None:
    """A warm-up's result is not looked at."""


@contextmanager
def _progress(args: ServeArgs, total: int) -> Iterator[Callable[[RequestResult], None]]:
    """A bar on standard error, when that is a terminal."""
    if args.disable_tqdm or not sys.stderr.isatty():
        yield _nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda result: bar.advance(task)
