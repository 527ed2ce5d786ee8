"""`usage`: what a request took, counted from events. Knows no endpoint."""

from __future__ import annotations

import msgspec

from tokenspeed.engine.interface import GenerationEvent


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """`cached_tokens`: prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """`reasoning_tokens`: output tokens that were reasoning, tags included."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a whole request. A prompt counts once, however many sequences it gave. The completion's details are
    there when there was reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class UsageMeter:
    """Running counts over all prompts and sequences of one HTTP request."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._outputs: dict[tuple[int, int], int] = {}

    def note(self, prompt: int, event: GenerationEvent) -> None:
        """Take the counts of an event of the prompt with this number."""
        self._prompts[prompt] = event.num_prompt_tokens
        if event.index == 0:  # its siblings find all of the prompt that sequence 0 computed
            self._cached[prompt] = event.num_cached_tokens
        self._outputs[prompt, event.index] = event.num_output_tokens

    def usage(self, num_reasoning_tokens: int = 0) -> Usage:
        """The counts so far."""
        num_prompt = sum(self._prompts.values())
        num_output = sum(self._outputs.values())
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            completion_tokens_details=(
                CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens)
                if num_reasoning_tokens
                else msgspec.UNSET
            ),
        )
