"""The pages of `/v1/responses` and `/v1/messages`: their examples run, and what they say is refused is what is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from fake_engine_client import FakeClient
from fake_server import running

from tokenspeed.server.anthropic.request import MESSAGES_REFUSED
from tokenspeed.server.responses_api.request import RESPONSES_REFUSED

PAGES = Path(__file__).parents[2] / "docs" / "serving"


@pytest.mark.parametrize(("name", "calls"), [("responses.md", 2), ("anthropic.md", 1)])
async def test_the_pages_example_runs(engine: FakeClient, capsys: pytest.CaptureFixture[str], name: str, calls: int):
    engine.reply = "Oslo"
    (code,) = re.findall(r"^```python\n(.*?)^```", (PAGES / name).read_text(), re.MULTILINE | re.DOTALL)
    async with running(engine, served_model_names=("default",)) as server:
        program = compile(code.replace("http://localhost:8000", server.url), name, "exec")
        await asyncio.to_thread(exec, program, {})
    assert capsys.readouterr().out.count("Oslo") == calls == len(engine.requests)


@pytest.mark.parametrize(
    ("name", "refused"), [("responses.md", RESPONSES_REFUSED.keys()), ("anthropic.md", MESSAGES_REFUSED.keys())]
)
def test_the_page_lists_what_is_refused(name: str, refused: set[str]):
    text = (PAGES / name).read_text()
    paragraph = text[text.index("Refused by name") :].partition("\n\n")[0]
    assert refused <= set(re.findall(r"`(\w+)`", paragraph)), sorted(refused)
