import random

import pytest
import torch

from actors.messages import DecodeRow, PrefillRow, StepPlan
from actors.shard_outputs import on_host, step_output
from models.steps import StepResult


def plan_of(proposing: list[bool], num_decode: int) -> StepPlan:
    """Emitting rows that propose or not; in front of each that prefills is one that does not end
    its prompt."""
    decode = [
        DecodeRow(slot=i, position=9, num_drafts=1, propose=propose)
        for i, propose in enumerate(proposing[:num_decode])
    ]
    prefill = [
        PrefillRow(slot=9, start=0, token_ids=(5,), fresh=True, last=last, propose=last and propose)
        for propose in proposing[num_decode:]
        for last in (False, True)
    ]
    return StepPlan(step=4, decode=tuple(decode), prefill=tuple(prefill))


def result(num_rows: int, drafts: torch.Tensor | None) -> StepResult:
    return StepResult(
        sampled=torch.tensor([[10 + i, -1, -1] for i in range(num_rows)]),
        num_drafts=torch.zeros(num_rows, dtype=torch.int32),
        logprobs=None,
        prompt_logprobs=None,
        drafts=drafts,
    )


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_the_drafts_of_a_guided_step_are_those_of_rows_that_propose(
    seed: int, num_drafts: int
) -> None:
    rng = random.Random(seed)
    proposing = [rng.random() < 0.5 for _ in range(rng.randrange(1, 5))]
    num_rows = len(proposing) + rng.randrange(3)
    drafts = torch.tensor([[rng.randrange(99) for _ in range(num_drafts)] for _ in range(num_rows)])
    plan = plan_of(proposing, num_decode=rng.randrange(len(proposing) + 1))
    output = step_output(plan, on_host(result(num_rows, drafts)), late_compiles=0)
    assert output.sampled == tuple((10 + i,) for i in range(len(proposing)))
    assert len(output.drafts) == len(proposing)
    for i, propose in enumerate(proposing):
        assert output.drafts[i] == (tuple(drafts[i].tolist()) if propose else ())


def test_other_steps_say_no_drafts() -> None:
    output = step_output(plan_of([True, True], 1), on_host(result(2, None)), late_compiles=0)
    assert output.drafts == ()
