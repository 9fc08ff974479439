"""Plain generation of one request, token by token in Python, with every sampling parameter."""

import math
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel

from actors.grammar import GrammarState
from actors.messages import SamplingParams
from tests.unit.models.draws import kept_tokens, noise


@torch.inference_mode()
def all_logits(target: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The logits `[tokens, vocab]` behind every token."""
    logits: torch.Tensor = target(torch.tensor([token_ids])).logits[0].float()
    return logits


def sample_plainly(
    target: PreTrainedModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    stops: Collection[int] = (),
    grammar: GrammarState | None = None,
) -> list[int]:
    """What a request emits; `stops` end it, and are the last token then. `choice` must be 0.

    A new `grammar` guides it.
    """
    assert sampling.choice == 0
    output: list[int] = []
    while len(output) < sampling.max_tokens and (not output or output[-1] not in stops):
        logits = all_logits(target, [*prompt, *output])[-1].tolist()
        shaped = shape(logits, prompt, output, sampling, stops)
        if grammar is not None:
            shaped = _guided(shaped, logits, grammar)
        output.append(_choice(shaped, len(prompt) + len(output), sampling))
        if grammar is not None:
            grammar.commit(output[-1:])
    return output


def shape(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: SamplingParams,
    stops: Collection[int],
) -> list[float]:
    """The logits of the next token that temperature and cuts act on."""
    values = list(logits)
    for word in sampling.bad_words:
        *before, last = word
        if list(output[len(output) - len(before) :]) == before and len(output) >= len(before):
            values[last] = -math.inf
    for token, bias in sampling.logit_bias:
        values[token] += bias
    if len(output) < sampling.min_tokens:
        for token in stops:
            values[token] = -math.inf
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= sampling.frequency_penalty * output.count(token)
        values[token] -= sampling.presence_penalty
    return values


def _guided(shaped: Sequence[float], logits: Sequence[float], grammar: GrammarState) -> list[float]:
    """What the grammar allows: of `logits` where the request forbids all of it."""
    bits = int.from_bytes(grammar.masks(())[1][0], "little")
    for values in (shaped, logits):
        left = [value if bits >> token & 1 else -math.inf for token, value in enumerate(values)]
        if max(left) > -math.inf:
            return left
    raise AssertionError("the grammar allows nothing")


def _choice(logits: Sequence[float], position: int, sampling: SamplingParams) -> int:
    best = max(logits)
    if sampling.temperature == 0:
        return logits.index(best)
    distances = [(best - logit) / sampling.temperature for logit in logits]
    keep = kept_tokens(distances, sampling.top_k, sampling.top_p, sampling.min_p)
    halves = sampling.seed & (2**32 - 1), (sampling.seed >> 32) & (2**32 - 1)
    scores = [
        noise(halves, position, token) - distance if stays else -math.inf
        for token, (distance, stays) in enumerate(zip(distances, keep, strict=True))
    ]
    return scores.index(max(scores))
