"""A long prompt on a GPT-OSS: chunks, and pages that leave their window, change nothing.

The pool is too small for two page lists of the whole prompt, so an engine whose sliding layers kept their pages could
not even admit the request.
"""

from __future__ import annotations

import pytest
import torch
from law_engine import engine_config, run
from transformers import GptOssConfig, GptOssForCausalLM

from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams

PROMPT_LEN = 6000
NUM_TOKENS = 12
CHUNK = 512
WINDOW = 128
PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, GptOssForCausalLM]:
    """Two layers, one of them with the published window; YaRN as published, with 16 times 512 positions."""
    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=97, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 16.0, "original_max_position_embeddings": 512,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    )  # fmt: skip
    torch.manual_seed(23)
    random = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in random.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.4)
    folder = tmp_path_factory.mktemp("gpt-oss")
    random.save_pretrained(folder)
    return str(folder), random


def prompt() -> list[int]:
    return torch.randint(0, 97, (PROMPT_LEN,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module")
def wanted(model: tuple[str, GptOssForCausalLM]) -> list[int]:
    return hf_greedy(model[1], prompt(), NUM_TOKENS)


@torch.inference_mode()
def hf_greedy(model: GptOssForCausalLM, ids: list[int], num_tokens: int) -> list[int]:
    """The whole prompt in one forward, then one token at a time."""
    given, cache, chosen = torch.tensor([ids]), None, []
    for _ in range(num_tokens):
        out = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        given = out.logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(int(given))
    return chosen


def test_chunks_and_freed_pages_equal_one_forward(model: tuple[str, GptOssForCausalLM], wanted: list[int]) -> None:
    folder, _ = model
    pages = -(-(PROMPT_LEN + NUM_TOKENS) // PAGE)
    config = engine_config(
        folder,
        chunked_prefill_size=CHUNK,
        prefix_granularity=PAGE,
        max_model_len=PROMPT_LEN + NUM_TOKENS,
        max_total_tokens=None,
        kv_cache_memory_gb=0.001,
    )
    page_bytes = PAGE * 2 * 16 * 4  # one layer of each kind: a page holds one key head of 16 float32 numbers
    assert config.kv_memory_bytes is not None and pages < config.kv_memory_bytes // page_bytes < 2 * pages
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    done = run(config, [AddRequest(request_id="long", prompt_token_ids=prompt(), sampling=greedy)])
    assert max(done.stats.step_tokens) == CHUNK
    assert done.tokens() == {("long", 0): (wanted, "length")}


def test_the_prompt_reaches_beyond_the_window(model: tuple[str, GptOssForCausalLM], wanted: list[int]) -> None:
    """Tokens depend on what the full layer sees far back; otherwise the test above would show little."""
    _, hf = model
    other = prompt()
    other[:3000] = reversed(other[:3000])
    assert hf_greedy(hf, other, 4) != wanted[:4]
