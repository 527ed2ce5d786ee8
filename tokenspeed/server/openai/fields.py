"""Fields that chat and completions share, and what they become. Also the fields that are refused by name.

A field is honoured, refused with a reason, or documented as having no effect on generation (`NO_EFFECT`). There is no
fourth kind: an unknown field is an error (see `body.to_struct`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenspeed.config.model import ModelConfig
from tokenspeed.protocol.errors import Field, InvalidRequest
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.server.openai.constraint import ConstraintFields

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# It becomes a header, and `$` alone allows a newline behind the end.
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:\-]{1,128}(?!\n)$")]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024

# Accepted, and without any effect on what is generated.
NO_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)

ANYTHING: tuple[Any, ...] = ("any value",)
"""Of a field that asks for nothing that an answer could lack: whatever it says is fine, and left out."""

# Known from other servers: (values that change nothing here and are therefore fine, why any other is refused).
_NOT_YET = "it is not built yet"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "store": ((None, False), "answers are never stored"),
    "service_tier": ((None, "auto", "default"), "there is only the default tier"),
    "guided_decoding_backend": ((None,), "the server has one; see --grammar-backend"),
    "guided_whitespace_pattern": ((None,), "the layout of JSON is the server's; see --disable-any-whitespace"),
    "use_beam_search": ((None, False), "beam search is not offered; use n with a temperature"),
    "length_penalty": ((None, 1, 1.0), "it belongs to beam search, which is not offered"),
    "early_stopping": ((None, False), "it belongs to beam search, which is not offered"),
    "spaces_between_special_tokens": ((None, True), "special tokens are written as the tokenizer spells them"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt before sending it"),
    "allowed_token_ids": ((None,), "use logit_bias"),
    "bad_words": ((None, []), "use logit_bias"),
    "logits_processors": ((None, []), "code is never taken from a request"),
    "custom_params": ((None,), "there are no custom sampling hooks"),
    "return_tokens_as_token_ids": ((None, False), "use return_token_ids"),
    "return_hidden_states": ((None, False), _NOT_YET),
    "lora_path": ((None,), f"adapters: {_NOT_YET}"),
    "session_params": ((None,), "send the whole conversation; its shared prefix is cached"),
    "kv_transfer_params": ((None,), f"disaggregated serving: {_NOT_YET}"),
    "vllm_xargs": ((None,), "send the fields themselves"),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`; only with `stream`.

    Fields:
        include_usage: one more chunk at the end with the whole request's usage.
        continuous_usage_stats: usage so far on every chunk; only with include_usage, as in vLLM.
        include_obfuscation: OpenAI pads chunks against traffic analysis; here only false.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(ConstraintFields, kw_only=True, forbid_unknown_fields=True):
    """The fields both endpoints take. None = not said: the model's generation config, then the usual default, decides.

    Fields (those that OpenAI's reference does not tell):
        top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids: see `SamplingParams`.
        sampling_seed: another name of seed. rid: of request_id. no_stop_trim: of include_stop_str_in_output.
        priority: lower runs earlier; needs `--schedule-policy priority`.
        cache_salt: requests with different salts share no cached prefix.
        return_token_ids: the answer also carries the prompt's and the output's token ids.
        prompt_logprobs: logprobs of the prompt's tokens with that many alternatives; not with stream.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Int64 | None = None
    sampling_seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


def drop_refused(
    fields: dict[str, Any], *tables: Mapping[str, tuple[tuple[Any, ...], str]], where: str = ""
) -> dict[str, Any]:
    """`fields` without those of the tables, when their values change nothing.

    Args:
        where: what the fields stand in: `"reasoning"`.

    Raises:
        InvalidRequest: a field with another value; names it and the reason.
    """
    kept = fields
    for table in tables:
        for name in table.keys() & fields.keys():
            neutral, why = table[name]
            is_neutral = neutral is ANYTHING or any(
                type(fields[name]) is type(value) and fields[name] == value for value in neutral
            )
            if not is_neutral:
                at = f"{where}.{name}" if where else name
                raise InvalidRequest(f"{at} cannot be used: {why}", param=at, code="unsupported_field")
            if kept is fields:
                kept = dict(fields)
            del kept[name]
    return kept


def check_stream(fields: GenerationFields) -> None:
    """What stream asks of other fields.

    Raises:
        InvalidRequest: stream_options without stream, obfuscation, or prompt_logprobs with stream.
    """
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise InvalidRequest("stream_options is only for stream = true", param="stream_options")
    if options is not None and options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation cannot be used: chunks are not padded",
            param="stream_options.include_obfuscation",
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed; send stream = false", param="prompt_logprobs")


def request_id_of(fields: GenerationFields) -> str | None:
    """`request_id`, or `rid`, which means the same."""
    picked = _either("request_id", fields.request_id, "rid", fields.rid)
    assert picked is None or isinstance(picked, str)
    return picked


def to_sampling(
    fields: GenerationFields,
    model: ModelConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Sampling parameters: the request's, else the model's generation config's, else the neutral ones.

    Raises:
        InvalidRequest: a value out of range, two names of one thing that disagree, an id outside the vocabulary.
    """
    defaults = model.sampling_defaults

    def pick(name: str, value: float | None, neutral: float) -> float:
        return value if value is not None else float(defaults.get(name, neutral))

    seed = _either("seed", fields.seed, "sampling_seed", fields.sampling_seed)
    assert seed is None or isinstance(seed, int)
    keep_stop = _either(
        "include_stop_str_in_output", fields.include_stop_str_in_output, "no_stop_trim", fields.no_stop_trim
    )
    for name, ids in (("logit_bias", fields.logit_bias or {}), ("stop_token_ids", fields.stop_token_ids or [])):
        for token_id in ids:
            if not 0 <= token_id < model.vocab_size:
                raise InvalidRequest(
                    f"{name} names token {token_id if token_id < 2**63 else 'beyond 64 bits'}, "
                    f"the vocabulary has ids 0 to {model.vocab_size - 1}",
                    param=name,
                )
    return SamplingParams(
        n=1 if fields.n is None else fields.n,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        temperature=pick("temperature", fields.temperature, 1.0),
        top_p=pick("top_p", fields.top_p, 1.0),
        top_k=int(pick("top_k", fields.top_k, 0)),
        min_p=pick("min_p", fields.min_p, 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=pick("repetition_penalty", fields.repetition_penalty, 1.0),
        logit_bias=fields.logit_bias or {},
        seed=seed,
        stop=_stop_strings(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        include_stop_str_in_output=bool(keep_stop),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def check_priority(fields: GenerationFields, is_enabled: bool) -> int:
    """The priority, 0 when not said.

    Raises:
        InvalidRequest: another than 0 where the scheduler would not look at it.
    """
    if fields.priority and not is_enabled:
        raise InvalidRequest(
            f"priority is {fields.priority}, but this server runs first come, first served; "
            "start it with --schedule-policy priority",
            param="priority",
        )
    return fields.priority or 0


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            [Field("stop"), f" holds {len(strings)} strings, the limit is {MAX_STOP_STRINGS}"], param="stop"
        )
    if any(len(text) > MAX_STOP_CHARS for text in strings):
        raise InvalidRequest([Field("stop"), f" holds a string longer than {MAX_STOP_CHARS} characters"], param="stop")
    return strings


def _either(name: str, value: object, other_name: str, other: object) -> object:
    """One value under two names."""
    if value is not None and other is not None and value != other:
        raise InvalidRequest(f"{name} and {other_name} mean the same but differ; send one of them", param=other_name)
    return value if value is not None else other
