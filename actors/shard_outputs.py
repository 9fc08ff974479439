"""What a step gave, from the device's tensors to a `StepOutput`."""

from typing import Any, NamedTuple

from actors.messages import StepOutput, StepPlan, TokenLogprobs
from models.choosing import TokenScores
from models.steps import StepResult


class HostResult(NamedTuple):
    """`StepResult` as lists; of scores, one list per field of `TokenScores`. `drafters_lost` says
    that there were no dedicated drafters any more when the step began."""

    sampled: list[list[int]]
    num_drafts: list[int]
    logprobs: list[list[Any]] | None
    prompt_logprobs: list[list[Any]] | None
    drafts: list[list[int]] | None
    drafters_lost: bool = False


def on_host(result: StepResult, *, drafters_lost: bool = False) -> HostResult:
    """Waits for the device."""
    return HostResult(
        sampled=result.sampled.tolist(),
        num_drafts=result.num_drafts.tolist(),
        logprobs=_lists(result.logprobs),
        prompt_logprobs=_lists(result.prompt_logprobs),
        drafts=None if result.drafts is None else result.drafts.tolist(),
        drafters_lost=drafters_lost,
    )


def step_output(plan: StepPlan, result: HostResult, late_compiles: int) -> StepOutput:
    """The rows of `result` in the plan's order, without padding."""
    count = len(plan.emitting)
    sampled = tuple(tuple(t for t in row if t >= 0) for row in result.sampled[:count])
    known = [row.num_tokens - row.last for row in plan.prefill]
    return StepOutput(
        step=plan.step,
        sampled=sampled,
        num_drafts=tuple(result.num_drafts[:count]),
        logprobs=_token_logprobs(result.logprobs, [len(row) for row in sampled]),
        prompt_logprobs=_token_logprobs(result.prompt_logprobs, known),
        drafts=()
        if result.drafts is None
        else tuple(
            tuple(drafts) if row.propose else ()
            for row, drafts in zip(plan.emitting, result.drafts, strict=False)
        ),
        late_compiles=late_compiles,
        drafters_lost=result.drafters_lost,
    )


def _lists(scores: TokenScores | None) -> list[list[Any]] | None:
    return None if scores is None else [each.tolist() for each in scores]


def _token_logprobs(
    scores: list[list[Any]] | None, counts: list[int]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Those of the first `counts[i]` tokens of each row i."""
    if scores is None:
        return ()
    return tuple(
        tuple(
            TokenLogprobs(logprob=logprob, rank=rank, top=tuple(zip(ids, values, strict=True)))
            for logprob, rank, ids, values in zip(
                *(each[row][:count] for each in scores), strict=True
            )
        )
        for row, count in enumerate(counts)
    )
