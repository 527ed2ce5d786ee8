"""Profiles of the engine's steps: torch's profiler around them, written as a Chrome trace.

Everything here runs on the thread that launches steps, because torch's profiler sees the operations of the thread that
started it. While nothing is profiled a step costs a look at one field. Not here: who asks, and how (server/).
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.messages import ProfileOptions

FOLDER_VARIABLE = "TOKENSPEED_PROFILER_DIR"
STACK_VARIABLE = "TOKENSPEED_PROFILE_WITH_STACK"
SUFFIX = "-rank0.trace.json.gz"
"""Tools that merge traces tell ranks by it; there is one rank."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    profiler: profile
    path: Path
    steps_left: int | None
    num_steps: int = 0  # recorded so far


class StepProfiler:
    """At most one profile at a time.

    Args:
        has_gpu: the steps run on a GPU.
        environment: variables of the process.
    """

    def __init__(self, has_gpu: bool, environment: Mapping[str, str] = os.environ) -> None:
        self._has_gpu = has_gpu
        self._environment = environment
        self._running: _Running | None = None
        self._ended: Path | None = None  # of a profile that ended by itself and that nobody has asked for yet

    def start(self, options: ProfileOptions) -> str:
        """Begin; returns the file that the trace will be written to.

        Raises:
            InvalidRequest: a profile runs already, or an option that cannot be had here.
        """
        if self._running is not None:
            raise InvalidRequest(f"a profile runs already, into {self._running.path}; stop it first")
        if "GPU" in options.activities and not self._has_gpu:
            raise InvalidRequest("activities holds GPU, but the model runs on a CPU; leave it out", param="activities")
        path = self._path(options)
        wanted = options.activities or (("CPU", "GPU") if self._has_gpu else ("CPU",))
        with_stack = options.with_stack
        if with_stack is None:
            with_stack = self._environment.get(STACK_VARIABLE, "1").lower() in ("1", "true")
        profiler = profile(
            activities=[ProfilerActivity.CUDA if name == "GPU" else ProfilerActivity.CPU for name in wanted],
            record_shapes=options.record_shapes,
            with_stack=with_stack,
        )
        profiler.start()
        self._ended = None
        self._running = _Running(profiler, path, options.num_steps)
        return str(path)

    def stop(self) -> str:
        """End the profile and write it; returns the file. One that ended by itself is named once.

        Raises:
            InvalidRequest: there is none, its trace cannot be written, or no step ran while it was recorded.
        """
        if self._running is not None:
            num_steps = self._running.num_steps
            self._write()
            if num_steps == 0:
                path, self._ended = self._ended, None
                raise InvalidRequest(f"no step ran between start and stop, so {path} holds none; send requests then")
        if self._ended is None:
            raise InvalidRequest("no profile runs; start one first")
        path, self._ended = self._ended, None
        return str(path)

    def step(self, step_id: int) -> AbstractContextManager[None]:
        """Around the launch of a step: names it in the trace, and counts it."""
        return _NOTHING if self._running is None else self._recorded(step_id)

    def close(self) -> None:
        """Write what still runs."""
        if self._running is not None:
            path = self._running.path
            self._write()
            logger.info("the profile was still running; its trace is %s", path)

    @contextmanager
    def _recorded(self, step_id: int) -> Iterator[None]:
        with record_function(f"step {step_id}"):
            yield
        running = self._running
        if running is None:
            return
        running.num_steps += 1
        if running.steps_left is None:
            return
        running.steps_left -= 1
        if running.steps_left == 0:
            try:
                self._write()
            except InvalidRequest as error:
                logger.error("%s", error)

    def _write(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        running.profiler.stop()
        try:
            running.profiler.export_chrome_trace(str(running.path))
        except (OSError, RuntimeError) as error:
            raise InvalidRequest(f"the trace could not be written to {running.path}: {error}") from error
        self._ended = running.path

    def _path(self, options: ProfileOptions) -> Path:
        name = options.profile_id or time.strftime("%Y%m%d-%H%M%S")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
            raise InvalidRequest(
                f"profile_id is {name[:100]!r}; it becomes a file's name and takes 1 to 100 letters, digits, '.', '_' "
                "and '-'",
                param="profile_id",
            )
        given = options.output_dir or self._environment.get(FOLDER_VARIABLE)
        folder = Path(given if given else tempfile.mkdtemp(prefix="tokenspeed-profile-"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in it
            raise InvalidRequest(
                f"output_dir is {str(folder)!r}, which cannot be made: {error}", param="output_dir"
            ) from None
        if not os.access(folder, os.W_OK):
            raise InvalidRequest(f"output_dir is {str(folder)!r}, which cannot be written to", param="output_dir")
        path = folder / f"{name}{SUFFIX}"
        if path.exists():
            raise InvalidRequest(f"{path} is there already; give another profile_id", param="profile_id")
        return path


_NOTHING = nullcontext()
