"""Completion prompts to token ids, in their four spellings."""

from __future__ import annotations

from typing import Any

from tokenspeed.engine.admission import check_fits
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.context import ServerContext

MAX_PROMPTS = 1024


async def tokenize_prompts(
    context: ServerContext, prompt: Any, add_special_tokens: bool
) -> list[tuple[str | None, list[int]]]:
    """A completion request's prompts: text (None when given as ids) and ids.

    Raises:
        InvalidRequest: none of the four spellings, none at all, too many, or one that cannot fit.
    """
    prompts = _split(prompt)
    texts = [one for one in prompts if isinstance(one, str)]
    for text in texts:
        check_fits(context.client.tokenizer, text, context.client.max_model_len)
    if not texts:
        return [(None, one) for one in prompts if isinstance(one, list)]
    return list(zip(texts, await encode(context, texts, add_special_tokens), strict=True))


async def encode(context: ServerContext, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    """Texts to ids. A raw prompt may spell special tokens: whoever writes it is the one who writes templates."""
    tokenizer = context.client.tokenizer

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens, True) for text in texts]

    return await context.texts.run(sum(map(len, texts)), encode_all)


def _split(prompt: Any) -> list[str] | list[list[int]]:
    wrong = "prompt must be a string, an array of strings, an array of token ids or an array of arrays of token ids"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest(wrong, param="prompt")
    if not prompt:
        raise InvalidRequest("prompt is an empty array, it must hold at least one prompt", param="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [_ids(prompt, "prompt")]
    if kinds not in ({str}, {list}):
        raise InvalidRequest(wrong, param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts, the limit is {MAX_PROMPTS}", param="prompt")
    if kinds == {str}:
        return [str(item) for item in prompt]
    for number, item in enumerate(prompt):
        if {type(part) for part in item} != {int}:
            raise InvalidRequest(f"prompt[{number}] must be a non-empty array of token ids", param="prompt")
    return [_ids(item, f"prompt[{number}]") for number, item in enumerate(prompt)]


def _ids(ids: list[int], where: str) -> list[int]:
    low, high = min(ids), max(ids)
    if low < 0 or high >= 2**31:  # the client knows the vocabulary; this only keeps numbers sane on the way
        raise InvalidRequest(f"{where} holds an id outside of [0, 2**31)", param="prompt")
    return ids
