"""The offline API: its arguments and results with the fake runner, then the embedded model both ways to run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fake_runner import NAN_TOKEN, FakeRunner, continuation

import tokenspeed
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.engine import llm as llm_module
from tokenspeed.engine.connect import start_engine
from tokenspeed.engine.interface import EngineClient, GenerationRequest
from tokenspeed.engine.llm import LLM
from tokenspeed.protocol.errors import CheckpointError, ConfigError, EngineDead, InvalidRequest
from tokenspeed.protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SMALL = {"max_num_seqs": 4, "max_model_len": 256, "max_total_tokens": 2048}
PAGE = Path(__file__).parents[2] / "docs/serving/python.md"


def fake(config, **fields) -> FakeRunner:
    return FakeRunner(msgspec.structs.replace(config, num_pages=128), **fields)


@pytest.fixture
def fake_llm(default_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    """The embedded model's tokenizer and template in front of the fake runner."""
    monkeypatch.setattr(llm_module, "build_runner", fake)
    with LLM(**SMALL) as llm:
        yield llm


def test_prompts_of_every_shape(fake_llm: LLM) -> None:
    one = fake_llm.generate("hello there", GREEDY)
    assert len(one) == 1 and one[0].prompt == "hello there" and one[0].outputs[0].finish_reason == "length"
    assert one[0].outputs[0].token_ids == continuation(one[0].prompt_token_ids, 6)
    ids = fake_llm.generate([5, 6, 7], GREEDY)
    assert (len(ids), ids[0].prompt, ids[0].prompt_token_ids) == (1, None, [5, 6, 7])
    many = fake_llm.generate(["a", [8, 9], "b"], [GREEDY, msgspec.structs.replace(GREEDY, max_tokens=2), GREEDY])
    assert [result.prompt for result in many] == ["a", None, "b"]
    assert [len(result.outputs[0].token_ids) for result in many] == [6, 2, 6]
    assert fake_llm.generate([], GREEDY) == []
    again = fake_llm.generate([[number % 90 + 1] * 5 for number in range(50)], GREEDY)
    assert [result.outputs[0].token_ids for result in again] == [
        continuation([number % 90 + 1] * 5, 6) for number in range(50)
    ]


def test_sequences_and_logprobs(fake_llm: LLM) -> None:
    sampling = msgspec.structs.replace(GREEDY, n=3, logprobs=2, prompt_logprobs=0)
    result = fake_llm.generate([[65, 66, 67]], sampling)[0]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert all(len(output.logprobs or []) == 6 for output in result.outputs)
    assert [entry.token_id for entry in result.prompt_logprobs or []] == [66, 67]
    plain = fake_llm.generate([[65, 66, 67]], GREEDY)[0]
    assert plain.outputs[0].logprobs is None and plain.prompt_logprobs is None


def test_chats(fake_llm: LLM) -> None:
    chat = [{"role": "user", "content": "hello"}]
    one, two = fake_llm.chat([chat, [*chat, {"role": "assistant", "content": "yes"}, chat[0]]], GREEDY)
    assert fake_llm.chat(chat, GREEDY)[0].prompt_token_ids == one.prompt_token_ids != two.prompt_token_ids
    with pytest.raises(InvalidRequest):
        fake_llm.chat([{"role": "user"}], GREEDY, chat_template="{{ raise_exception('no') }}")


def test_refusals(fake_llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="256"):
        fake_llm.generate([[1] * 300, [1]], GREEDY)
    with pytest.raises(ValueError, match="2 prompts but 1"):
        fake_llm.generate(["a", "b"], [GREEDY])
    for options, words in (
        ({"port": 1}, "only the server"),
        ({"max_queue_len": 5}, "only the server"),
        ({"x": 1}, r"no option 'x'; see the flags in docs/configuration/server\.md"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(**options)
    with pytest.raises(CheckpointError):
        LLM("/nowhere/at/all.gguf")


def test_one_bad_prompt_fails_alone(fake_llm: LLM) -> None:
    bad, good = fake_llm.generate([[NAN_TOKEN], [3]], GREEDY)
    assert bad.outputs[0].finish_reason == "error" and "NaN" in (bad.outputs[0].error or "")
    assert good.outputs[0].finish_reason == "length"


def test_defaults_come_from_the_model(fake_llm: LLM) -> None:
    sampling = fake_llm.default_sampling_params()
    assert (sampling.temperature, sampling.top_p) == (0.2, 0.9), "of SmolLM2-Instruct's generation_config"


def test_death_and_close(default_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step_id: int) -> None:
        if step_id == 3:
            raise RuntimeError("power cut")

    monkeypatch.setattr(llm_module, "build_runner", lambda config: fake(config, before_step=fail))
    llm = LLM(**SMALL)
    with pytest.raises(EngineDead, match="power cut"):
        llm.generate(["a", "b"], GREEDY)
    with pytest.raises(EngineDead, match="power cut"):
        llm.generate("a", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", GREEDY)


def test_a_start_that_fails_says_why(default_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config):
        raise ConfigError("--num-threads is 99")

    monkeypatch.setattr(llm_module, "build_runner", refuse)
    with pytest.raises(ConfigError, match="--num-threads is 99"):
        LLM(**SMALL)


def test_importing_the_package_is_light() -> None:
    script = "import sys, tokenspeed; tokenspeed.SamplingParams(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert tokenspeed.LLM is LLM
    with pytest.raises(AttributeError):
        tokenspeed.nothing  # noqa: B018


@pytest.mark.timeout(300)
async def test_the_embedded_model_on_a_thread_and_in_a_process(default_checkpoint: Checkpoint) -> None:
    """Both ways to run an engine give the same tokens; here with `close` forgotten for the first."""
    script = (
        "import tokenspeed\n"
        f"llm = tokenspeed.LLM(num_threads=1, seed=1, **{SMALL!r})\n"
        "chat = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "result = llm.chat(chat, tokenspeed.SamplingParams(max_tokens=7, temperature=0.0))[0]\n"
        "print(result.prompt_token_ids, result.outputs[0].token_ids, result.outputs[0].text, sep='|')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    prompt, tokens, text = done.stdout.strip().split("|")
    assert "Paris" in text

    config = llm_module.configure(llm_module.EngineArgs(num_threads=1, seed=1, **SMALL))
    client: EngineClient = await start_engine(config)
    try:
        chat = client.render_chat([{"role": "user", "content": "What is the capital of France?"}])
        request = GenerationRequest("r", chat, SamplingParams(max_tokens=7, temperature=0.0))
        events = [event async for event in client.generate(request)]
        assert str(chat) == prompt
        assert str([token_id for event in events for token_id in event.token_ids]) == tokens
        assert "".join(event.text for event in events) == text
        assert await client.command("check") == (True, None)
    finally:
        await client.close()


@pytest.mark.timeout(300)
def test_the_page_runs_from_top_to_bottom(default_checkpoint: Checkpoint) -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert "Paris" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1] in (" small", " large")


def test_the_page_names_every_field_of_sampling() -> None:
    text = PAGE.read_text()
    assert not [name for name in SamplingParams.__struct_fields__ if name != "thinking" and f"`{name}`" not in text]
