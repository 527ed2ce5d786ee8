"""The pages of the APIs: their examples run, and the routes, fields and refusals that they list are those there are."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fake_engine_client import FakeClient
from fake_server import running

from tokenspeed.server.anthropic.request import MESSAGES_REFUSED
from tokenspeed.server.middleware import OPEN_PATHS
from tokenspeed.server.openai.chat import ChatRequest
from tokenspeed.server.openai.completions import CompletionRequest
from tokenspeed.server.responses_api.request import RESPONSES_REFUSED

PAGES = Path(__file__).parents[2] / "docs" / "serving"


@pytest.mark.parametrize(("name", "calls"), [("chat.md", 1), ("responses.md", 2), ("anthropic.md", 1)])
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


async def test_the_list_of_endpoints_is_that_of_the_server(http: httpx.AsyncClient):
    rows = [line for line in (PAGES / "endpoints.md").read_text().splitlines() if line.startswith("| `")]
    listed = [(route, row) for row in rows for route in re.findall(r"`((?:GET|POST|DELETE) \S+)`", row.split(" | ")[0])]
    paths = (await http.get("/openapi.json")).json()["paths"]
    there = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert sorted(route for route, _ in listed) == sorted(there | {"GET /openapi.json"})
    assert {route.split()[1] for route, row in listed if "(open)" in row} == OPEN_PATHS


async def test_operations_have_names_of_their_own(http: httpx.AsyncClient, recwarn: pytest.WarningsRecorder):
    """FastAPI warned of `Duplicate Operation ID parse_function_call` whenever the schema was asked for."""
    paths = (await http.get("/openapi.json")).json()["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(names) == len(set(names))
    assert not [warning for warning in recwarn if "Operation ID" in str(warning.message)]


def test_the_page_of_chat_names_every_field():
    text = (PAGES / "chat.md").read_text()
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not {name for name in fields if f"`{name}`" not in text}
