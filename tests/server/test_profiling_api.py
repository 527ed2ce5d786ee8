"""`/start_profile` and `/stop_profile`: fields, refusals, and a trace of a real engine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import httpx
import pytest
from app_client import http_client
from fake_engine_client import FakeClient

from tokenspeed.config.args import EngineArgs
from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.connect import start_local_engine
from tokenspeed.engine.llm import configure
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.runner.build import build_runner
from tokenspeed.server.app import build_app


async def test_every_field_reaches_the_engine(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.command_result = (True, "/tmp/x.json")
    body = {
        "output_dir": "/tmp/here",
        "num_steps": 7,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": True,
        "profile_id": "mine",
        "start_step": None,
        "profile_by_stage": False,
    }
    response = await http.post("/start_profile", json=body)
    assert response.status_code == 200
    assert response.json() == {"success": True, "message": "recording for 7 steps", "file": "/tmp/x.json"}
    assert engine.profile == ProfileOptions(
        output_dir="/tmp/here",
        num_steps=7,
        activities=("CPU", "GPU"),
        with_stack=False,
        record_shapes=True,
        profile_id="mine",
    )
    assert engine.commands == ["start_profile"]


async def test_a_body_may_be_left_out(http: httpx.AsyncClient, engine: FakeClient) -> None:
    for content in (b"", b"{}"):
        response = await http.post("/start_profile", content=content)
        assert response.status_code == 200 and "until it is stopped" in response.json()["message"]
        assert engine.profile == ProfileOptions()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"start_step": 3}, "start_step"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"num_steps": 0}, "num_steps"),
        ({"activities": ["CPU", "PROTON"]}, "activities"),
        ({"activities": ["cpu"]}, "activities"),
        ({"output_dir": ""}, "output_dir"),
        ({"num_step": 3}, "num_step"),
    ],
)
async def test_refused_by_name(
    http: httpx.AsyncClient, engine: FakeClient, body: dict[str, object], param: str
) -> None:
    response = await http.post("/start_profile", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.commands == []


async def test_what_the_engine_refuses(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.command_result = (False, "no profile runs; start one first")
    response = await http.post("/stop_profile")
    assert response.status_code == 400
    assert response.json() == {"success": False, "message": "no profile runs; start one first", "file": None}
    engine.is_alive = False
    for path in ("/start_profile", "/stop_profile"):
        assert (await http.post(path)).status_code == 503


async def test_a_key_is_needed_where_there_is_one(engine: FakeClient) -> None:
    async with http_client(engine, api_keys=("secret",)) as client:
        assert (await client.post("/start_profile")).status_code == 401
        assert engine.commands == []


@pytest.mark.timeout(300)
async def test_a_trace_of_a_real_engine(default_checkpoint: object, tmp_path: Path) -> None:
    config = configure(EngineArgs(max_num_seqs=2, max_model_len=128, max_total_tokens=512, num_threads=1))
    client = await start_local_engine(config, build_runner)
    try:
        app = build_app(client, ServerConfig(served_model_names=("tiny",)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            options = {"output_dir": str(tmp_path), "num_steps": 3, "with_stack": False}
            started = (await http.post("/start_profile", json=options)).json()
            again = await http.post("/start_profile", json=options)
            assert again.status_code == 400 and "runs already" in again.json()["message"]
            body = {"prompt": "a b c", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body, timeout=120)
            assert answer.json()["usage"]["completion_tokens"] == 6
            stopped = (await http.post("/stop_profile", timeout=120)).json()
            assert (await http.post("/stop_profile")).status_code == 400
    finally:
        await client.close()
    assert started["success"] and stopped["success"] and stopped["file"] == started["file"]
    with gzip.open(stopped["file"]) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert len({name for name in names if str(name).startswith("step ")}) == 3
    assert any(str(name).startswith("aten::") for name in names)
