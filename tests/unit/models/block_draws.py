"""Tokens that steps with speculation draw, by their place in the block and what stands before."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.choosing import bucket_for, slot_sampling
from actors.messages import (
    Bucket,
    DecodeRow,
    GenerateRequest,
    PrefillRow,
    SamplingParams,
    StepPlan,
)
from actors.request import Request
from actors.shard_inputs import step_inputs, write_samplings
from models.backends.backend import Backend
from models.rows import StepInputs
from models.steps import ModelRank
from tests.oracle.plain_sampling import all_logits, shape
from tests.tiny import make_pair, train_pair
from tests.unit.models.draws import chi_square, distribution, random_seeds, sampling_rows
from tests.unit.models.ranks import load_model_rank

DRAWS = 100_000
NUM_SLOTS, NUM_STEPS, NUM_DRAFTS, VOCAB_SIZE = 1024, 2, 2, 3
# What a request may emit in the first token's step and those behind it.
NUM_TOKENS = 1 + NUM_STEPS * (NUM_DRAFTS + 1)
# The first token, and those of a verify step.
NUM_PLACES = 1 + (NUM_DRAFTS + 1)
PROMPT = (0, 2, 1, 1)
PAGE_SIZE, NUM_PAGES = 4, 4
# Of a context that fewer draws met the counts say little.
LEAST_DRAWS = 500

WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.1},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_p": 0.65},
    {"min_p": 0.2},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.5},
    {"logit_bias": ((0, 1.5), (2, -0.5)), "bad_words": ((2, 0),)},
    {
        "temperature": 1.5,
        "top_k": 2,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "repetition_penalty": 0.8,
    },
]
SAMPLINGS = [SamplingParams(**{"max_tokens": NUM_TOKENS, "temperature": 1.0} | way) for way in WAYS]
# Of all places and ways together, one in a hundred would fail by chance, were seeds not fixed.
LEAST_P = 0.01 / (NUM_PLACES * len(WAYS))


def three_token_pair(directory: Path) -> tuple[Path, Path]:
    """A pair whose drafter is often right behind `PROMPT`."""
    pair = make_pair(
        directory,
        "qwen3",
        vocab_size=VOCAB_SIZE,
        block_size=NUM_DRAFTS + 1,
        hidden_size=16,
        intermediate_size=16,
        num_layers=3,
        target_layer_ids=(0, 1),
        num_draft_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    train_pair(*pair, [PROMPT], max_new_tokens=NUM_TOKENS)
    return pair


def load_rank(pair: tuple[Path, Path], backend: Backend | None = None) -> ModelRank:
    return load_model_rank(
        *pair,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        max_model_len=NUM_PAGES * PAGE_SIZE,
        backend=backend,
    )


class Drawn(NamedTuple):
    """What was drawn at one place behind each of several outputs."""

    outputs: list[list[int]]
    counts: Tensor  # [outputs, vocabulary] int64


@torch.inference_mode()
def drawn_at_every_place(rank: ModelRank, sampling: SamplingParams) -> list[Drawn]:
    """At least `DRAWS` draws for each place, from as many seeds as that takes."""
    requests = {slot: _request(slot, sampling) for slot in range(NUM_SLOTS)}
    samplings = tuple(slot_sampling(request) for request in requests.values())
    write_samplings(StepPlan(step=0, samplings=samplings), rank.sampling)
    prefill = _inputs(
        requests,
        prefill=[
            PrefillRow(slot=slot, start=0, token_ids=PROMPT, fresh=True, last=True, propose=True)
            for slot in requests
        ],
    )
    # Planned like those of a scheduler that has not read the step before.
    decode = _inputs(
        requests,
        decode=[
            DecodeRow(
                slot=slot,
                position=len(PROMPT),
                num_drafts=NUM_DRAFTS,
                propose=True,
                prev_in_flight=True,
            )
            for slot in requests
        ],
    )
    # Outputs are named by numbers, of a digit more than there are tokens.
    counts = torch.zeros(NUM_PLACES, (VOCAB_SIZE + 1) ** NUM_TOKENS, VOCAB_SIZE, dtype=torch.int64)
    found: list[Drawn] = []
    while not found or min(int(drawn.counts.sum()) for drawn in found) < DRAWS:
        rank.sampling.seeds[:NUM_SLOTS] = random_seeds(NUM_SLOTS, int(counts[0].sum()))
        _count_draws(rank, prefill, decode, counts)
        found = [_drawn(of_place) for of_place in counts]
    return found


def assert_exact(target: PreTrainedModel, sampling: SamplingParams, drawn: Sequence[Drawn]) -> None:
    """That draws have the distribution of `target`, in float64, and that this test sees a fiftieth
    of the probability moved."""
    assert len(drawn) == NUM_PLACES
    for place in drawn:
        assert place.counts.sum() >= DRAWS
        assert _fit(target, sampling, place) > LEAST_P
        assert _fit(target, sampling, place, moved=0.02) < 1e-9


def _count_draws(rank: ModelRank, prefill: StepInputs, decode: StepInputs, counts: Tensor) -> None:
    """Add what each slot's request emits to `counts [places, output before, vocabulary]`."""
    outputs = torch.zeros(NUM_SLOTS, dtype=torch.int64)

    def count(place: int, tokens: Tensor) -> None:
        valid = tokens >= 0
        where = (outputs[valid], tokens[valid].long())
        counts[place].index_put_(where, torch.tensor(1), accumulate=True)
        outputs[valid] = (VOCAB_SIZE + 1) * outputs[valid] + tokens[valid] + 1

    count(0, rank.step(prefill).sampled[:, 0])
    lengths = planned = decode.decode_positions
    for _ in range(NUM_STEPS):
        sampled = rank.step(replace(decode, decode_positions=planned)).sampled
        for place, tokens in enumerate(sampled.T, start=1):
            count(place, tokens)
        planned = lengths + NUM_DRAFTS + 1
        lengths = lengths + (sampled >= 0).sum(1, dtype=torch.int32)


def _request(slot: int, sampling: SamplingParams) -> Request:
    message = GenerateRequest(request_id=str(slot), prompt_token_ids=PROMPT, sampling=sampling)
    max_len = len(PROMPT) + NUM_TOKENS
    return Request(message=message, stop_token_ids=frozenset(), max_len=max_len, slot=slot)


def _inputs(
    requests: dict[int, Request],
    decode: Sequence[DecodeRow] = (),
    prefill: Sequence[PrefillRow] = (),
) -> StepInputs:
    """Of a step without padding."""
    bucket = Bucket(
        decode_rows=len(decode),
        verify_width=NUM_DRAFTS + 1,
        prefill_rows=len(prefill),
        prefill_width=len(PROMPT),
        emitting_rows=NUM_SLOTS,
        num_drafts=NUM_DRAFTS,
        num_tokens=sum(row.num_tokens for row in (*decode, *prefill)),
        context_pages=NUM_PAGES,
    )
    bucket = bucket_for(bucket, decode, prefill, requests)
    plan = StepPlan(step=0, bucket=bucket, decode=tuple(decode), prefill=tuple(prefill))
    return step_inputs(plan, NUM_SLOTS, VOCAB_SIZE)


def _drawn(counts: Tensor) -> Drawn:
    common = (counts.sum(1) >= LEAST_DRAWS).nonzero().flatten()
    return Drawn([list(_tokens(number))[::-1] for number in common.tolist()], counts[common])


def _tokens(number: int) -> Iterable[int]:
    """The tokens of an output by its number, last first."""
    while number:
        number, digit = divmod(number, VOCAB_SIZE + 1)
        yield digit - 1


def _fit(
    target: PreTrainedModel, sampling: SamplingParams, drawn: Drawn, moved: float = 0
) -> float:
    """How probable it is that exact draws fit no better, had `moved` of the probability gone from
    the most probable token to the next, behind every output."""
    how = sampling_rows(
        1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    rows = []
    for output in drawn.outputs:
        logits = all_logits(target, [*PROMPT, *output])[-1].tolist()
        shaped = shape(logits, PROMPT, output, sampling, ())
        rows.append(distribution(torch.tensor(shaped), how))
    wanted = torch.stack(rows)
    order = wanted.argsort(dim=1, descending=True)
    wanted.scatter_add_(1, order[:, :1], torch.full_like(wanted[:, :1], -moved))
    wanted.scatter_add_(1, order[:, 1:2], torch.full_like(wanted[:, :1], moved))
    return chi_square(drawn.counts, wanted)
