"""Do constrained requests slow their neighbours? Free streams alone, beside more free ones, beside constrained ones.

    python benchmarks/constrained.py --base-url http://127.0.0.1:8000 [--free 16] [--others 8] [--output-len 400]

Against a running server. Three rounds, each with the same `--free` streams (random token ids, greedy, no end): alone,
with `--others` more like them, and with as many that must follow a JSON schema. The others are long
(`--others-output-len`), so that as a rule none begins anew while the measured ones run: prompts would cost their
neighbours more than the grammar. The first two say what company costs;
the third what the grammar adds. A round is measured once every stream beside has given a token, and fails when they
give none meanwhile. Interleaved `--repeats` times, medians, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

FIRST_TOKEN_TIMEOUT_S = 120.0
"""The first grammar of a server may have to wait for its compiler to start."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 3},
        "count": {"type": "integer"},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--free", type=int, default=16, help="measured streams of free text")
    parser.add_argument("--others", type=int, default=8, help="streams beside them")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--others-output-len", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@dataclass(slots=True)
class Company:
    """The streams beside: whether each has begun, and the chunks that all have given."""

    begun: list[asyncio.Event] = field(default_factory=list)
    num_chunks: int = 0


class Load:
    """Streams against one server."""

    def __init__(self, session: aiohttp.ClientSession, args: argparse.Namespace, model: str) -> None:
        self._session = session
        self._args = args
        self._model = model
        self._rng = random.Random(args.seed)

    def _body(self, output_len: int, **fields: Any) -> dict[str, Any]:
        prompt = [self._rng.randrange(1000, 40000) for _ in range(self._args.input_len)]
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }

    async def _read(self, body: dict[str, Any], arrived: Callable[[], None] = lambda: None) -> int:
        """Output tokens of one stream; `arrived` is called at each chunk of its answer."""
        url = f"{self._args.base_url.rstrip('/')}/v1/completions"
        tokens = 0
        async with self._session.post(url, json=body) as response:
            if response.status != 200:
                raise SystemExit(f"the server answered {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("error"):
                        raise SystemExit(f"a stream ended in an error: {event['error']}")
                    if event.get("choices"):
                        arrived()
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
        return tokens

    async def _keep(self, fields: dict[str, Any], company: Company) -> None:
        """One place beside the measured streams: as soon as a request ends, the next begins."""
        begun = asyncio.Event()
        company.begun.append(begun)

        def arrived() -> None:
            begun.set()
            company.num_chunks += 1

        while True:
            await self._read(self._body(self._args.others_output_len, **fields), arrived)

    async def round(self, others: dict[str, Any] | None) -> tuple[float, float]:
        """Tokens a second of the measured streams, and chunks a second of those beside them meanwhile.

        The clock starts when every other stream has given its first token: a grammar that still compiles keeps its
        requests waiting, and they would be no company at all.
        """
        company = Company()
        places = 0 if others is None else self._args.others
        tasks = [asyncio.create_task(self._keep(others or {}, company)) for _ in range(places)]
        await asyncio.sleep(0)
        begun = asyncio.gather(*(event.wait() for event in company.begun))
        await asyncio.wait_for(_unless_failed(begun, tasks), FIRST_TOKEN_TIMEOUT_S)
        before, started = company.num_chunks, time.perf_counter()
        bodies = [self._body(self._args.output_len, ignore_eos=True) for _ in range(self._args.free)]
        tokens = await asyncio.gather(*(self._read(body) for body in bodies))
        took = time.perf_counter() - started
        chunks = company.num_chunks - before
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        if others is not None and not chunks:
            raise SystemExit("the streams beside gave nothing while the free ones were measured: no comparison")
        return sum(tokens) / took, chunks / took


async def _unless_failed(begun: asyncio.Future[Any], tasks: list[asyncio.Task[None]]) -> None:
    """Wait for `begun`; a task that ends first has failed."""
    await asyncio.wait([begun, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
    await begun


async def measure(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """For each round's kind, medians: tokens a second of the measured streams, chunks a second of the others."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        async with session.get(f"{args.base_url.rstrip('/')}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        load = Load(session, args, model)
        schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
        kinds: dict[str, dict[str, Any] | None] = {
            "alone": None,
            "beside free": {"ignore_eos": True},
            "beside constrained": schema,
        }
        for others in kinds.values():
            await load.round(others)
        rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(args.repeats):
            for kind, others in kinds.items():
                rounds[kind].append(await load.round(others))
    return {
        kind: (statistics.median(rate for rate, _ in values), statistics.median(beside for _, beside in values))
        for kind, values in rounds.items()
    }


def main() -> None:
    args = parse_args()
    measured = asyncio.run(measure(args))
    rates = {kind: rate for kind, (rate, _) in measured.items()}
    for kind, (rate, beside) in measured.items():
        of_alone = f"{rate / rates['alone']:.1%} of alone"
        print(f"{kind:>20}: {rate:8.1f} tok/s of {args.free} free streams, {of_alone}; others {beside:.1f} chunks/s")
    constrained, free = rates["beside constrained"], rates["beside free"]
    print(f"what the grammar adds: {constrained / free - 1:+.1%} against as many free streams")
    others = {kind: beside for kind, (_, beside) in measured.items()}
    summary = {"benchmark": "constrained", "free": args.free, "others": args.others, "tok_s": rates}
    shares = {"of_beside_free": constrained / free, "of_alone": constrained / rates["alone"]}
    print(json.dumps({**summary, "others_chunks_s": others, **shares}))


if __name__ == "__main__":
    main()
