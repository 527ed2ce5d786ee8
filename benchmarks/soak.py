"""Minutes of mixed, partly hostile traffic against a KV pool too small for it; then everything must be as before.

    python benchmarks/soak.py --minutes 10 --clients 32

Each client loops over a seeded mix: chat and completion streams, whole answers, disconnects mid-stream and mid-prompt,
long prompts, prompts beyond the context, bad JSON, wrong fields, stop strings, n > 1, logprobs. Fails (exit 1) when a
request is lost (no terminal event, no answer), when a 5xx comes that was not a deliberate 503, when `check()` does not
hold once idle, when a page is still held, or when the memory of the server keeps growing. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import psutil

WORDS = [
    "the",
    "a",
    "cat",
    "river",
    "engine",
    "écrire",
    "数学",
    "кошка",
    "🙂",
    "hello",
    "compute",
    "42",
    "never",
    "stop",
    "list",
    "json",
    "{}",
    "[]",
    "\n",
]


@dataclass(slots=True)
class Tally:
    """Outcomes by kind, faults in words, memory samples in MiB."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--model", default="default")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--pool-tokens", type=int, default=3072, help="KV pool, far below clients x context")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Client:
    """One client's loop. Every method sends one request of its kind and reports what became of it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, rng: random.Random, tally: Tally, context: int):
        self._session = session
        self._url = url
        self._rng = rng
        self._tally = tally
        self._context = context

    async def run(self, until: float) -> None:
        kinds = [
            (self.stream, 6),
            (self.whole, 3),
            (self.disconnect, 4),
            (self.long_prompt, 2),
            (self.too_long, 1),
            (self.bad_json, 1),
            (self.bad_field, 1),
            (self.stop_string, 2),
            (self.several, 1),
            (self.logprobs, 1),
        ]
        methods, weights = zip(*kinds, strict=True)
        while time.monotonic() < until:
            method = self._rng.choices(methods, weights)[0]
            try:
                await asyncio.wait_for(method(), timeout=180)
            except TimeoutError:
                self._fault(f"{method.__name__}: no end after 180 s")
            except aiohttp.ClientError as error:
                self._fault(f"{method.__name__}: {type(error).__name__}: {error}")

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=num_words))

    def _chat(self, num_words: int = 20, **fields: object) -> dict[str, object]:
        body: dict[str, object] = {
            "model": "default",
            "messages": [{"role": "user", "content": self._text(num_words)}],
            "max_tokens": self._rng.randint(1, 120),
        }
        return body | fields

    async def stream(self) -> None:
        await self._stream(self._chat(stream=True, stream_options={"include_usage": True}))

    async def stop_string(self) -> None:
        await self._stream(self._chat(stream=True, stop=["e", " the", "\n\n"][: self._rng.randint(1, 3)]))

    async def several(self) -> None:
        await self._stream(self._chat(stream=True, n=3), sequences=3)

    async def long_prompt(self) -> None:
        await self._stream(self._chat(num_words=self._context // 4, stream=True))

    async def _stream(self, body: dict[str, object], sequences: int = 1) -> None:
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            if not self._status("stream", response.status, 200):
                return
            finished, done = 0, False
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self._fault(f"stream: error event {event['error']}")
                        return
                    finished += sum(choice.get("finish_reason") is not None for choice in event["choices"])
            if finished != sequences or not done:
                self._fault(f"stream: {finished} finish reasons for {sequences} sequences, done {done}")
            self._tally.outcomes["streams finished"] += 1

    async def whole(self) -> None:
        async with self._session.post(f"{self._url}/v1/chat/completions", json=self._chat()) as response:
            if self._status("whole", response.status, 200):
                answer = await response.json()
                if answer["choices"][0]["finish_reason"] not in ("stop", "length"):
                    self._fault(f"whole: finish_reason {answer['choices'][0]['finish_reason']}")

    async def logprobs(self) -> None:
        body = {"model": "default", "prompt": self._text(30), "max_tokens": 8, "logprobs": 3, "echo": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if self._status("logprobs", response.status, 200):
                choice = (await response.json())["choices"][0]
                if len(choice["logprobs"]["tokens"]) != len(choice["logprobs"]["token_logprobs"]):
                    self._fault("logprobs: lists of different length")

    async def disconnect(self) -> None:
        body = self._chat(num_words=self._rng.choice([5, 200]), stream=self._rng.random() < 0.7, max_tokens=400)
        wait_s = self._rng.random() * 1.5
        task = asyncio.create_task(self._read_all(body))
        await asyncio.wait([task], timeout=wait_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._tally.outcomes["disconnects"] += 1

    async def _read_all(self, body: dict[str, object]) -> None:
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            await response.read()

    async def too_long(self) -> None:
        async with self._session.post(
            f"{self._url}/v1/chat/completions", json=self._chat(num_words=4 * self._context)
        ) as response:
            self._status("too long", response.status, 400)

    async def bad_json(self) -> None:
        data = self._rng.choice([b"{", b'{"messages": [', b"\xff\xfe", b"[]", b"null", b'{"model": NaN}'])
        headers = {"content-type": "application/json"}
        url = f"{self._url}/v1/chat/completions"
        async with self._session.post(url, data=data, headers=headers) as response:
            self._status("bad JSON", response.status, 400)

    async def bad_field(self) -> None:
        name, value = self._rng.choice(
            [("temperature", "hot"), ("max_tokens", -1), ("top_p", 7), ("n", 0), ("stop", 5)]
        )
        body = self._chat() | {name: value}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            self._status("bad field", response.status, 400)

    def _status(self, what: str, got: int, expected: int) -> bool:
        self._tally.outcomes[f"{what}: {got}"] += 1
        if got == expected:
            return True
        if got not in (429, 503):
            self._fault(f"{what}: HTTP {got} instead of {expected}")
        return False

    def _fault(self, text: str) -> None:
        self._tally.faults.append(text)


async def watch_memory(pid: int, tally: Tally, until: float) -> None:
    """Resident memory of the server and its children, every five seconds."""
    root = psutil.Process(pid)
    while time.monotonic() < until:
        processes = [root, *root.children(recursive=True)]
        tally.memory_mib.append(sum(process.memory_info().rss for process in processes) / 2**20)
        await asyncio.sleep(5)


async def soak(url: str, pid: int, args: argparse.Namespace, tally: Tally) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await wait_ready(session, url)
        until = time.monotonic() + args.minutes * 60  # the start does not count
        clients = [
            Client(session, url, random.Random(f"{args.seed}-{number}"), tally, args.max_model_len)
            for number in range(args.clients)
        ]
        await asyncio.gather(watch_memory(pid, tally, until), *(client.run(until) for client in clients))
        await idle_checks(session, url, tally)


async def wait_ready(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(1200):
        try:
            async with session.get(f"{url}/readiness") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server was not ready after 60 s")


async def idle_checks(session: aiohttp.ClientSession, url: str, tally: Tally) -> None:
    """Once idle: nothing runs, no page is held, the invariants hold, the cache can be flushed, and it still answers."""
    await asyncio.sleep(2)
    async with session.get(f"{url}/metrics") as response:
        metrics = await response.text()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        lines = [line for line in metrics.splitlines() if line.startswith(f"tokenspeed:{name}")]
        if not lines or any(float(line.rsplit(" ", 1)[1]) for line in lines):
            tally.faults.append(f"idle: {name} is not zero: {lines}")
    for path in ("/debug/check", "/flush_cache"):
        async with session.post(f"{url}{path}") as response:
            if response.status != 200:
                tally.faults.append(f"idle: {path} answered {response.status}: {await response.text()}")
    async with session.get(f"{url}/health_generate") as response:
        if response.status != 200:
            tally.faults.append(f"idle: /health_generate answered {response.status}")


def memory_growth(samples: list[float]) -> float:
    """Median of the last quarter over the median of the second quarter: 1.0 = flat (the first quarter warms up)."""
    if len(samples) < 8:
        return 1.0
    quarter = len(samples) // 4
    early, late = sorted(samples[quarter : 2 * quarter]), sorted(samples[-quarter:])
    return late[len(late) // 2] / early[len(early) // 2]


def main() -> None:
    args = parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenspeed", "serve", args.model, "--port", str(port)]
    command += ["--max-model-len", str(args.max_model_len), "--max-total-tokens", str(args.pool_tokens)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    tally = Tally()
    try:
        asyncio.run(soak(f"http://127.0.0.1:{port}", process.pid, args, tally))
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=90)
    if code != 0:
        tally.faults.append(f"the server exited with code {code}")
    growth = memory_growth(tally.memory_mib)
    if growth > 1.05:
        tally.faults.append(f"memory grew by {growth - 1:.1%} from the second to the last quarter")
    for outcome, count in sorted(tally.outcomes.items()):
        print(f"{count:7d}  {outcome}")
    for fault in tally.faults[:20]:
        print(f"FAULT  {fault}")
    summary = {
        "benchmark": "soak",
        "minutes": args.minutes,
        "clients": args.clients,
        "requests": sum(tally.outcomes.values()),
        "faults": len(tally.faults),
        "memory_mib_first_last": [round(tally.memory_mib[0]), round(tally.memory_mib[-1])] if tally.memory_mib else [],
        "memory_growth": round(growth, 4),
    }
    print(json.dumps(summary))
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
