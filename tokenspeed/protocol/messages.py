"""What server process and engine process say to each other. Encoded by msgspec as tagged MessagePack; no pickle.

Client to engine: `ToEngine`. Engine to client: `FromEngine`. For every `AddRequest` that the engine accepted, each of
its n sequences gets any number of `SequenceOutput`s and exactly one with a `finish_reason`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from tokenspeed.protocol.grammar import GrammarKind, GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class AddRequest(msgspec.Struct, tag="add", kw_only=True, omit_defaults=True):
    """Generate from a prompt.

    Fields:
        request_id: unique among live requests.
        prompt_token_ids: 1 .. max_model_len - 1 ids, each inside the vocabulary (the client has checked).
        sampling: as the user gave it, defaults filled in. `max_tokens` is set (the client clips it to the context).
        priority: lower runs earlier under `--schedule-policy priority`; ties by arrival.
        cache_salt: requests with different salts never share prefix pages.
        arrival_s: time.time() at the client.
        grammar: what the output has to obey, or None.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival_s: float = 0.0
    grammar: GrammarSpec | None = None


class AbortRequest(msgspec.Struct, tag="abort", omit_defaults=True):
    """Stop a request and free its pages within a step. Unknown ids are ignored (it may just have ended).

    Fields:
        request_id: whose.
        index: the one sequence to stop (the client found its stop string), or None = all n of them.
    """

    request_id: str
    index: int | None = None


CommandName = Literal["flush_cache", "check", "ping", "stats", "start_profile", "stop_profile"]


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a profile of the engine's steps records, and where its trace goes.

    Fields:
        output_dir: folder of the trace; None = that of TOKENSPEED_PROFILER_DIR, else a new temporary one.
        num_steps: steps after which it ends by itself; None = it runs until it is stopped.
        activities: CPU, GPU; empty = what the device has.
        with_stack: record Python stacks; None = as TOKENSPEED_PROFILE_WITH_STACK says, else yes.
        record_shapes: record the shapes of operations' inputs.
        profile_id: beginning of the file's name; None = the time.
    """

    output_dir: str | None = None
    num_steps: int | None = None
    activities: tuple[Literal["CPU", "GPU"], ...] = ()
    with_stack: bool | None = None
    record_shapes: bool = False
    profile_id: str | None = None


class Command(msgspec.Struct, tag="command", omit_defaults=True):
    """Something other than a request; answered by one `Reply` with the same call_id.

    Names: `flush_cache` (fails while requests run), `check` (runs the invariants of scheduler and cache; ok = they
    hold), `ping` (answered by the loop itself, so it proves the loop turns), `stats`, `start_profile` (with `profile`;
    the reply's text is the trace's future file), `stop_profile` (the text is the file; steps wait while it is written).
    """

    call_id: int
    name: CommandName
    profile: ProfileOptions | None = None


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End now; whatever still runs gets an `abort` terminal event first."""


ToEngine = AddRequest | AbortRequest | Command | Shutdown


class Logprobs(msgspec.Struct, array_like=True):
    """`TokenLogprobs` on the wire: see there."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one sequence. Never part of a cycle, so the collector need not look at it.

    Fields:
        request_id, index: whose.
        token_ids: newly sampled tokens, in order; a stop token is included as the last one.
        logprobs: one an id, when asked.
        prompt_logprobs: once, with the first output after the prompt is computed: entry i belongs to prompt position
            i + 1. Only on index 0.
        num_cached_tokens: prompt tokens found in the prefix cache; on the first output of the sequence.
        finish_reason: on the last output only.
        stop_token_id: the token that ended it, when finish_reason is "stop".
        error: for finish_reason "error": what went wrong, for the user.
        error_code: `grammar.INVALID_GRAMMAR` when it was the request's own fault; else None.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    prompt_logprobs: list[Logprobs] = []
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_code: str | None = None


class Continued(msgspec.Struct, frozen=True, gc=False):
    """News of sequences that have one more token each, and nothing else to tell: as columns, because that is what most
    steps come to. Reads like a list of `SequenceOutput`.

    Fields:
        request_ids, indices: whose. token_ids: theirs, one each.
    """

    request_ids: list[str]
    indices: list[int]
    token_ids: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[SequenceOutput]:
        return (
            SequenceOutput(request_id=request_id, index=index, token_ids=[token_id])
            for request_id, index, token_id in zip(self.request_ids, self.indices, self.token_ids, strict=True)
        )


News = list[SequenceOutput] | Continued


class Outputs(msgspec.Struct, tag="outputs"):
    """All news of one step."""

    sequences: News


class EngineStats(msgspec.Struct, tag="stats", kw_only=True):
    """A snapshot for metrics, sent with a step's outputs at most ten times a second, and when idle."""

    num_running: int
    num_waiting: int
    num_pages_total: int
    num_pages_used: int  # held by live requests
    num_pages_cached: int  # only in the prefix index, free to evict
    num_preemptions: int  # since start
    num_prefix_hit_tokens: int  # since start
    num_prompt_tokens: int  # since start, admitted prompts
    num_generated_tokens: int  # since start
    step_tokens: list[int]  # tokens of each forward since the last snapshot
    num_nan_aborted: int = 0
    num_compiling: int = 0  # sequences that wait for their grammar, not in num_waiting
    num_grammars: int = 0  # compiled ones in memory, kept or in use
    grammar_bytes: int = 0  # what they take, roughly


class KVGroup(msgspec.Struct, kw_only=True):
    """Layers whose caches live by one rule, and what a full pool holds for them; see `cache.capacity.GroupProfile`."""

    name: str
    window: int | None  # tokens that a query sees, None = all
    sequence_pages: int  # of a sequence of `max_model_len` tokens while it decodes
    kept_tokens: int


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """The engine can take requests. Sent once, first."""

    max_model_len: int
    max_num_seqs: int
    kv_capacity_tokens: int
    vocab_size: int
    report: list[str]  # what was chosen and why, for the log
    kv_groups: list[KVGroup] = []
    grammar_kinds: list[GrammarKind] = []  # what an output may be held to; none where constrained decoding is off


class Reply(msgspec.Struct, tag="reply", kw_only=True, omit_defaults=True):
    """The answer to a `Command`: `error` says why it failed, `text` what one that did not has to say, if anything."""

    call_id: int
    ok: bool
    error: str | None = None
    text: str | None = None
    stats: EngineStats | None = None


class Fatal(msgspec.Struct, tag="fatal"):
    """The engine is about to exit non-zero. Every live request is lost; the client ends each with an error event."""

    error: str


FromEngine = Ready | Outputs | EngineStats | Reply | Fatal
