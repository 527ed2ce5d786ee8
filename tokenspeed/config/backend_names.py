"""What the flags that name a backend have in common: which names are for which device, and what a wrong one is told.

Such a flag is checked by `resolve`, not where the command line is read: what to use instead depends on the device.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokenspeed.protocol.errors import ConfigError

AUTO = "auto"
_WHERE = {"cpu": "a CPU", "cuda": "a GPU"}


@dataclass(frozen=True, slots=True)
class BackendNames:
    """The names that a flag knows.

    Fields:
        flag: as it is typed.
        kind: of backend, in a sentence.
        served: what a backend serves, likewise.
        of_device: kind of device -> backends for it, our own first: that one needs nothing else to be installed.
        without_implementation: names of the public contract that nothing here stands for -> why.
        aliases: other names of `auto`.
    """

    flag: str
    kind: str
    served: str
    of_device: Mapping[Literal["cpu", "cuda"], tuple[str, ...]]
    without_implementation: Mapping[str, str]
    aliases: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """What can be asked for on some device, for help and documentation."""
        return (AUTO, *self.aliases, *(name for names in self.of_device.values() for name in names))

    def check(self, choice: str, device: Literal["cpu", "cuda"]) -> None:
        """
        Raises:
            ConfigError: nothing of this name is for this kind of device. Names what runs there in any case.
        """
        here = self.of_device[device]
        if choice in (AUTO, *self.aliases, *here):
            return
        if choice in self.without_implementation:
            reason = self.without_implementation[choice]
        elif choice in self.shown:
            reason = f"it is for {'a GPU' if device == 'cpu' else 'a CPU'}"
        else:
            close = difflib.get_close_matches(choice, self.shown, n=1)
            reason = "there is no backend of this name" + (f" (did you mean {close[0]}?)" if close else "")
        raise ConfigError(
            f"{self.flag} {choice} cannot run on {_WHERE[device]}: {reason}; use one of: {AUTO}, {here[0]}"
        )

    def select(self, choice: str, device: str, reasons: Mapping[str, str | None]) -> str:
        """The backend that a choice comes to, `auto` to the first that can serve.

        Args:
            reasons: backend -> why it cannot serve the model, or None; in order of preference.
        Raises:
            ConfigError: the choice is unknown or cannot serve (the message names what would), or nothing can.
        """
        usable = [name for name, reason in reasons.items() if reason is None]
        if choice in usable:
            return choice
        if choice == AUTO:
            if usable:
                return usable[0]
            raise ConfigError(f"no {self.kind} backend can serve {self.served} on {device}: {grouped(reasons)}")
        reason = self.without_implementation.get(choice) or reasons.get(choice) or "there is no backend of this name"
        if not usable:
            raise ConfigError(f"{self.flag} {choice}: {reason}; no backend can serve {self.served}: {grouped(reasons)}")
        would = ", ".join([AUTO, *usable])
        raise ConfigError(f"{self.flag} {choice} cannot run on {device}: {reason}; use one of: {would}")


def grouped(reasons: Mapping[str, str | None]) -> str:
    """Who lost and why, those of one reason together."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(group)}: {reason}" for reason, group in names.items())
