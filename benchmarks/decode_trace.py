"""Gaps between decode steps on a GPU, from a torch profiler's trace, and what a step costs the host.

    python benchmarks/decode_trace.py --model-config qwen3-8b.json --batch 1,64

Equal random prompts decode greedily; once every request has begun, the host's time is taken over 40 steps without a
profiler, then 13 steps are traced (`start_profile`, as on the server), of which ten pairs of replays are looked at.
Host time is processor time of the engine's thread: the loop (schedule, read results, encode and send), launching, and
making the result once the device is done; waiting for it is left out. The engine is measured as it is served: in a
process of its own (`clocked_engine.py`), the requests and their news on the server's channel; a new one for each batch
size, because a profiler leaves hooks behind that make every call of CUDA dearer for the host. The last line is JSON.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import clocked_engine
import msgspec
from clocked_engine import CLOCKED_STEPS, Clock, clock_file

from tokenspeed.bench.replay_gaps import ReplayGaps, replay_gaps
from tokenspeed.config.args import DEFAULT_MODEL, EngineArgs
from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.launch import EngineProcess, describe_exit, wait_ready
from tokenspeed.engine.llm import configure
from tokenspeed.protocol.errors import ConfigError, EngineDead
from tokenspeed.protocol.messages import AddRequest, Command, Fatal, Outputs, ProfileOptions, Reply
from tokenspeed.protocol.sampling import SamplingParams

TRACED_STEPS = 10
SKIPPED_STEPS = 2
OUTPUT_LEN = 160
SHARE_LIMIT = 0.05
"""Of the step's time, for the gaps between replays."""


@dataclass(frozen=True, slots=True)
class Row:
    """One batch size: microseconds of the host a step, without a profiler, and what the trace says. Launches and
    results are parts of `host_us`."""

    batch: int
    step_us: float
    host_us: float
    launch_us: float
    result_us: float
    trace: ReplayGaps
    file: str


class Engine:
    """An engine process with a clocked runner."""

    def __init__(self, config: EngineConfig) -> None:
        self._vocab_size = config.model.vocab_size
        command = (sys.executable, str(Path(clocked_engine.__file__).resolve()))
        self._engine = EngineProcess(config, "warning", command)
        wait_ready(self._engine)

    def close(self) -> None:
        self._engine.stop()

    def measure(self, batch: int, prompt_len: int, folder: str) -> Row:
        channel, rng = self._engine.channel, random.Random(batch)
        sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        for number in range(batch):
            prompt = [rng.randrange(self._vocab_size) for _ in range(prompt_len)]
            channel.send(AddRequest(request_id=f"{batch}-{number}", prompt_token_ids=prompt, sampling=sampling))
        lengths = dict.fromkeys(range(batch), 0)
        self._until(lengths, at_least=8 + CLOCKED_STEPS + 8)
        profile_id = f"batch-{batch}"
        options = ProfileOptions(
            output_dir=folder,
            profile_id=profile_id,
            num_steps=SKIPPED_STEPS + TRACED_STEPS + 1,
            with_stack=False,
        )
        channel.send(Command(batch, "start_profile", options))
        file = self._until(lengths, at_least=OUTPUT_LEN)
        with gzip.open(file) as trace:
            events: list[dict[str, Any]] = json.load(trace)["traceEvents"]
        clock = msgspec.json.decode(clock_file(folder, profile_id).read_bytes(), type=Clock)
        return Row(
            batch,
            1e6 * statistics.median(clock.steps),
            1e6 * statistics.median(clock.hosts),
            1e6 * statistics.median(clock.launches),
            1e6 * statistics.median(clock.results),
            replay_gaps(events, SKIPPED_STEPS, TRACED_STEPS),
            file,
        )

    def _until(self, lengths: dict[int, int], at_least: int) -> str:
        """Take news until every request has so many tokens; what a command answered meanwhile."""
        answer = ""
        while min(lengths.values()) < at_least:
            messages = self._engine.channel.receive(60)
            if not messages and self._engine.exit_code is not None:
                raise EngineDead(describe_exit(self._engine.exit_code))
            for message in messages:
                match message:
                    case Outputs(sequences=outputs):
                        for output in outputs:
                            lengths[int(output.request_id.partition("-")[2])] += len(output.token_ids)
                            if output.error:
                                raise EngineDead(output.error)
                    case Reply(ok=True, text=text):
                        answer = text or ""
                    case Reply(error=error) | Fatal(error=error):
                        raise EngineDead(error or "no reason given")
                    case _:
                        pass
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--model-config", help="a config.json; weights are random")
    parser.add_argument("--batch", default="1,64", help="batch sizes (1,64)")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-dir", help="folder of the traces (a temporary one)")
    asked = parser.parse_args()
    batches = [int(word) for word in asked.batch.split(",")]
    args = EngineArgs(
        model=asked.model_config or asked.model,
        load_format="dummy" if asked.model_config else "auto",
        device="cuda",
        max_model_len=asked.prompt_len + OUTPUT_LEN,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )
    folder = asked.output_dir or tempfile.mkdtemp(prefix="tokenspeed-trace-")
    rows = []
    for batch in batches:
        try:
            engine = Engine(configure(args))
        except ConfigError as error:
            raise SystemExit(str(error)) from None
        try:
            rows.append(engine.measure(batch, asked.prompt_len, folder))
        finally:
            engine.close()
    print("batch   step us   host us   launch us   result us   traced: step us   gaps %   worst %   GPU idle %")
    for row in rows:
        trace = row.trace
        print(
            f"{row.batch:5d} {row.step_us:9.0f} {row.host_us:9.0f} {row.launch_us:11.0f} "
            f"{row.result_us:11.0f} {trace.step_us:17.0f} "
            f"{100 * trace.gap_share:8.2f} {100 * trace.worst_gap_share:9.2f} {100 * trace.idle_share:12.2f}"
        )
    is_good = all(row.trace.gap_share < SHARE_LIMIT for row in rows)
    print(json.dumps({"benchmark": "decode_trace", "gaps_under_5_percent": is_good, "rows": [asdict(r) for r in rows]}))


if __name__ == "__main__":
    main()
