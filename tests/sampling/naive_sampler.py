"""What the sampler should do, written plainly in float64 for one row, and helpers to build admissions."""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission
from tokenspeed.sampling.sampler import Sampler

CPU = torch.device("cpu")


def admission(
    slot: int,
    sampling: SamplingParams,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
) -> Admission:
    return Admission(
        slot=slot,
        request_id=f"r{slot}",
        index=0,
        token_ids=[*prompt, *output],
        prompt_len=len(prompt),
        pages=(),
        sampling=sampling,
        banned_token_ids=banned,
    )


def sampler_of(params: list[SamplingParams], vocab_size: int) -> Sampler:
    """A sampler with one admitted slot an entry."""
    sampler = Sampler(len(params), vocab_size, CPU)
    for slot, sampling in enumerate(params):
        sampler.admit(admission(slot, sampling))
    return sampler


def edited(
    logits: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int], banned: tuple[int, ...] = ()
) -> np.ndarray:
    x = logits.astype(np.float64)
    for token_id, bias in sampling.logit_bias.items():
        if token_id < len(x):
            x[token_id] += bias
    if len(output) < sampling.min_tokens:
        x[list(banned)] = -np.inf
    for token_id in {*prompt, *output}:
        r = sampling.repetition_penalty
        x[token_id] = x[token_id] / r if x[token_id] > 0 else x[token_id] * r
    for token_id in set(output):
        x[token_id] -= sampling.frequency_penalty * output.count(token_id) + sampling.presence_penalty
    return x


def distribution(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top_k, min_p, top_p; ties with the last token kept are kept."""
    x = logits.astype(np.float64) / sampling.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if 0 < sampling.top_k < len(p):
        p[logits < np.sort(logits)[-sampling.top_k]] = 0
    p[p < sampling.min_p * p.max()] = 0
    p /= p.sum()
    if sampling.top_p < 1:
        ordered = np.sort(p)[::-1]
        last = int(np.argmax(np.cumsum(ordered) >= sampling.top_p - 1e-12))
        p[p < ordered[last]] = 0
    return p / p.sum()
