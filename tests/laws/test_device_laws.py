"""A GPU and a CPU say the same in float32: tiny models of every family, and the embedded default against transformers.

The CPU's half of this runs everywhere (tests/models); these need a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from law_engine import DEVICE, FAMILIES, engine_config, run, write_model

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="there is no GPU")

CHATS = json.loads((Path(__file__).parents[1] / "models" / "default_model_greedy.json").read_text())["chats"]


def greedy(prompts: list[list[int]], max_tokens: int) -> list[AddRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_tiny_models_say_the_same_on_both(family: str, eager: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path, family)
    work = greedy([[1, 2, 3], list(range(5, 70)), [9] * 17, [40]], 24)
    on_cpu = run(engine_config(folder, device="cpu"), work)
    on_gpu = run(engine_config(folder, enforce_eager=eager, disable_overlap_schedule=False), work)
    assert on_gpu.tokens() == on_cpu.tokens()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_capped_logits_are_the_same_on_both(eager: bool, tmp_path: Path) -> None:
    """No family here has a cap of its own; Gemma 2's field is read in all."""
    folder = write_model(tmp_path, "llama")
    work = greedy([[1, 2, 3], list(range(5, 70)), [9] * 17, [40]], 24)
    plain = run(engine_config(folder, device="cpu"), work)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_logit_softcapping": 1.0}))
    on_cpu = run(engine_config(folder, device="cpu"), work)
    on_gpu = run(engine_config(folder, enforce_eager=eager, disable_overlap_schedule=False), work)
    assert on_gpu.tokens() == on_cpu.tokens() != plain.tokens()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_the_embedded_model_says_what_transformers_says(eager: bool, default_checkpoint: Checkpoint) -> None:
    work = greedy([chat["prompt_ids"] for chat in CHATS], 64)
    options = {"enforce_eager": eager, "disable_overlap_schedule": False, "prefix_granularity": 64}
    ran = run(engine_config("default", max_model_len=1024, max_total_tokens=4096, **options), work)
    for number, chat in enumerate(CHATS):
        assert ran.texts[str(number), 0].token_ids == chat["greedy_ids"]
