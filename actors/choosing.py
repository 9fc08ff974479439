"""What the sampling parameters of requests become in the plan of a step, and in its output."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import get_args

from actors.messages import (
    Bucket,
    Choosing,
    DecodeRow,
    PrefillRow,
    SamplingParams,
    SlotSampling,
    TokenLogprobs,
)
from actors.request import Request
from actors.seeds import choice_seed

_WAYS: tuple[Choosing, ...] = get_args(Choosing)


def slot_sampling(request: Request) -> SlotSampling:
    """What the device needs to know once, with the first row of a request that got its slot."""
    sampling, prompt_len = request.message.sampling, len(request.message.prompt_token_ids)
    edits = [(token_id, bias, request.max_len) for token_id, bias in sampling.logit_bias]
    if sampling.min_tokens:
        until = min(prompt_len + sampling.min_tokens, request.max_len)
        edits += [(token_id, -inf, until) for token_id in sorted(request.stop_token_ids)]
    return SlotSampling(
        slot=request.held_slot,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=choice_seed(sampling.seed, sampling.choice),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        edits=tuple(edits),
        bad_words=sampling.bad_words,
        prompt_len=prompt_len,
        history=request.known_tokens(0, request.first_position)
        if _choosing(sampling) == "shaped"
        else (),
    )


def bucket_for(
    bucket: Bucket,
    decode: Sequence[DecodeRow],
    prefill: Sequence[PrefillRow],
    running: Mapping[int, Request],
) -> Bucket:
    """`bucket` with what the requests of its rows, `running` by slot, ask of choices."""
    of = {slot: request.message.sampling for slot, request in running.items()}
    slots = [row.slot for row in decode]
    ways = [_choosing(of[slot]) for slot in (*slots, *(row.slot for row in prefill))]
    emitting = (*slots, *(row.slot for row in prefill if row.last))
    return replace(
        bucket,
        choosing=max(ways, key=_WAYS.index),
        num_logprobs=_most(of[slot].logprobs for slot in emitting),
        num_prompt_logprobs=_most(of[row.slot].prompt_logprobs for row in prefill),
        guided=any(row.masks for row in decode) or any(row.masks for row in prefill),
    )


def asked(found: Iterable[TokenLogprobs], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """What a request gets of a step's log-probabilities that asks for `num_top` alternatives."""
    if num_top is None:
        return ()
    return tuple(replace(each, top=each.top[:num_top]) for each in found)


def _choosing(sampling: SamplingParams) -> Choosing:
    penalties = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty - 1,
    )
    if any((*penalties, sampling.logit_bias, sampling.bad_words, sampling.min_tokens)):
        return "shaped"
    return "sampled" if sampling.temperature > 0 else "greedy"


def _most(counts: Iterable[int | None]) -> int:
    return max((count for count in counts if count is not None), default=-1)
