"""What the engine core asks of a runner. Tests drive core and scheduler with a fake that has this face and no torch."""

from __future__ import annotations

from typing import Protocol, TypeVar

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.protocol.step import StepPlan, StepResult

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """What a runner has been asked for: a `Future`, or something lighter. One thread asks."""

    def result(self) -> T_co:
        """Wait for it, asleep or not; raises what went wrong. May be called again."""
        ...


class Runner(Protocol):
    """Executes plans in order, one at a time, on a thread or device queue of its own. Its methods are called by one
    thread."""

    @property
    def groups(self) -> list[GroupSpec]:
        """Cache groups with the number of pages that memory allows; fixed after construction."""
        ...

    @property
    def report(self) -> list[str]:
        """Choices made while starting, each with its reason, for the log."""
        ...

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles what constrained requests must obey, before they are admitted; None: they cannot be served."""
        ...

    def execute(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue a plan. The result fails only when the whole step failed (the engine is then dead); what concerns one
        request alone is in its `RowResult.error`. A second plan may be queued before the first's result is taken; a
        third may have to wait for the device: a runner has buffers for so many."""
        ...

    def capture(self) -> None:
        """Record step graphs, where the device has them, and warm every path up."""
        ...

    def start_profile(self, options: ProfileOptions) -> Pending[str]:
        """Record the steps from the next one on; the result is the file that the trace will be written to.

        The result raises InvalidRequest when that cannot be done.
        """
        ...

    def stop_profile(self) -> Pending[str]:
        """End the profile and write its trace, while further steps wait; the result is the file.

        The result raises InvalidRequest when none was started.
        """
        ...

    def close(self) -> None:
        """Finish what is queued and free the device."""
        ...
