"""An engine started without a tokenizer: ids in, ids out, and every wish for text is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed.engine.llm import LLM
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.sampling import SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny model of random weights, from a folder that has nothing but a config.json."""
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, seed=0, num_threads=1) as model:
        yield model


def test_ids_in_ids_out(llm):
    (result,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=1))
    (output,) = result.outputs
    assert (len(output.token_ids), output.text, output.finish_reason) == (5, "", "length")
    assert output.logprobs is not None and [entry.token_id for entry in output.logprobs] == output.token_ids


@pytest.mark.parametrize("prompt", ["text", ["text", "more"]])
def test_a_text_is_refused(llm, prompt):
    with pytest.raises(InvalidRequest, match="the prompt is text, but this engine runs without a tokenizer"):
        llm.generate(prompt, SamplingParams(max_tokens=2))


def test_messages_and_stop_strings_are_refused(llm):
    with pytest.raises(InvalidRequest, match="messages are text") as refused:
        llm.chat([{"role": "user", "content": "hi"}])
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest, match="stop strings are text") as refused:
        llm.generate([1], SamplingParams(max_tokens=2, stop=("x",)))
    assert refused.value.param == "stop"


def test_stop_token_ids_work(llm):
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    first = llm.generate([5, 6], greedy)[0].outputs[0].token_ids[0]
    (result,) = llm.generate([5, 6], SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=(first,)))
    assert (result.outputs[0].token_ids, result.outputs[0].stop_reason) == ([first], first)
