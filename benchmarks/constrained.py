"""Do constrained requests slow their neighbours? Free streams alone, beside more free ones, beside constrained ones.

    python benchmarks/constrained.py --base-url http://127.0.0.1:8000 [--free 16] [--others 8] [--output-len 200]

Against a running server. Three rounds, each with the same `--free` streams (random token ids, greedy, no end): alone,
with `--others` more like them, and with as many that must follow a JSON schema. The first two say what company costs;
the third what the grammar adds. Interleaved `--repeats` times, medians, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

import aiohttp

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
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


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

    async def _read(self, body: dict[str, Any]) -> int:
        """Output tokens of one stream."""
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
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
        return tokens

    async def _keep(self, fields: dict[str, Any], counts: list[int]) -> None:
        """One place beside the measured streams: as soon as a request ends, the next begins."""
        while True:
            counts.append(await self._read(self._body(self._args.output_len, **fields)))

    def _start(self, fields: dict[str, Any], counts: list[int]) -> asyncio.Task[None]:
        return asyncio.create_task(self._keep(fields, counts))

    async def round(self, others: dict[str, Any] | None) -> tuple[float, int]:
        """Tokens a second of the measured streams, and tokens of those beside them."""
        counts: list[int] = []
        company = [] if others is None else [self._start(others, counts) for _ in range(self._args.others)]
        if company:
            await asyncio.sleep(0.5)  # all of them decode
        started = time.perf_counter()
        bodies = [self._body(self._args.output_len, ignore_eos=True) for _ in range(self._args.free)]
        tokens = await asyncio.gather(*(self._read(body) for body in bodies))
        rate = sum(tokens) / (time.perf_counter() - started)
        for task in company:
            task.cancel()
        results = await asyncio.gather(*company, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return rate, sum(counts)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
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
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(args.repeats):
            for kind, others in kinds.items():
                rates[kind].append((await load.round(others))[0])
    return {kind: statistics.median(values) for kind, values in rates.items()}


def main() -> None:
    args = parse_args()
    rates = asyncio.run(measure(args))
    for kind, rate in rates.items():
        print(f"{kind:>20}: {rate:8.1f} tok/s of {args.free} free streams, {rate / rates['alone']:.1%} of alone")
    constrained, free = rates["beside constrained"], rates["beside free"]
    print(f"what the grammar adds: {constrained / free - 1:+.1%} against as many free streams")
    summary = {"benchmark": "constrained", "free": args.free, "others": args.others, "tok_s": rates}
    print(json.dumps({**summary, "of_beside_free": constrained / free, "of_alone": constrained / rates["alone"]}))


if __name__ == "__main__":
    main()
