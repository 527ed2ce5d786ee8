"""An engine on a thread of this process, driven over its channel: token ids in, one wall-clock time out.

No tokenizer, no client and no event loop stand between the clock and the engine's own loop.
"""

from __future__ import annotations

import time

import msgspec

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.launch import EngineThread, describe_exit, wait_ready
from tokenspeed.protocol.errors import EngineDead
from tokenspeed.protocol.messages import AddRequest, Command, EngineStats, Fatal, Outputs, Reply
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.runner.build import build_runner

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class OfflineEngine:
    """Started on construction.

    Args:
        sampling: of every request, whatever its length.
    Fields:
        ready: what the engine said of itself.
        start_s: seconds from the beginning of its construction until it was ready.

    Raises:
        ConfigError, CheckpointError, EngineDead: it could not start.
    """

    def __init__(self, config: EngineConfig, sampling: SamplingParams = GREEDY) -> None:
        started = time.perf_counter()
        self._sampling = sampling
        self._engine = EngineThread(config, build_runner)
        self.ready = wait_ready(self._engine)
        self.start_s = time.perf_counter() - started
        self._num_requests = 0

    def run(self, prompts: list[list[int]], output_len: int) -> float:
        """Generate exactly `output_len` tokens after each prompt, all submitted at once.

        Returns:
            Seconds from the first submission until the last request has ended.

        Raises:
            EngineDead: the engine failed, or a request ended in another way than by its length.
        """
        sampling = msgspec.structs.replace(self._sampling, max_tokens=output_len)
        requests = [
            AddRequest(request_id=f"bench-{self._num_requests + place}", prompt_token_ids=prompt, sampling=sampling)
            for place, prompt in enumerate(prompts)
        ]
        self._num_requests += len(requests)
        left = len(requests)
        started = time.perf_counter()
        for request in requests:
            self._engine.channel.send(request)
        while left:
            left -= self._take_ended()
        return time.perf_counter() - started

    def stats(self) -> EngineStats:
        """The engine's counters now."""
        self._engine.channel.send(Command(0, "stats"))
        while True:
            for message in self._engine.channel.receive(None):
                if isinstance(message, Reply) and message.stats is not None:
                    return message.stats
                self._refuse_death(message)

    def close(self) -> None:
        """End the engine and free the model. A second call does nothing."""
        self._engine.stop()

    def _take_ended(self) -> int:
        """Wait for news; how many requests have ended in them."""
        ended = 0
        messages = self._engine.channel.receive(None)
        for message in messages:
            if isinstance(message, Outputs) and isinstance(message.sequences, list):  # else all have gone on
                for output in message.sequences:
                    if output.finish_reason not in (None, "length"):
                        raise EngineDead(f"a request ended by {output.finish_reason}: {output.error}")
                    ended += output.finish_reason is not None
            self._refuse_death(message)
        if not messages and self._engine.exit_code is not None:
            raise EngineDead(describe_exit(self._engine.exit_code))
        return ended

    def _refuse_death(self, message: object) -> None:
        if isinstance(message, Fatal):
            raise EngineDead(message.error)
