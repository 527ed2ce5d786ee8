"""Chat templates that come with the package, for checkpoints that have none: `templates/NAME.jinja`."""

from __future__ import annotations

from importlib.resources import files


def builtin_chat_templates() -> dict[str, str]:
    """Name -> Jinja text."""
    folder = files("tokenspeed.catalog") / "templates"
    found = {item.name.removesuffix(".jinja"): item for item in folder.iterdir() if item.name.endswith(".jinja")}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}
