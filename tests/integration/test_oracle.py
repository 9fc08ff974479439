"""The demo pair against the oracle of DFlash: every draft, every step, and acceptance length."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from actors.llm import LLM
from actors.messages import SamplingParams
from models import hub
from models.rows import StepInputs
from models.steps import ModelRank, StepResult
from tests.integration.demo import demo_args, num_prompts, short_prompts
from tests.oracle.dflash_reference import ReferenceDrafter, generate, load_drafter

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Reads every step before it plans the next, as the oracle does: the steps are the same."""
    with LLM(**demo_args(async_scheduling=False)) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafter() -> ReferenceDrafter:
    return load_drafter(hub.resolve(hub.DEMO_DRAFTER), torch.float32)


def test_drafts_and_acceptance_equal_the_oracles(
    llm: LLM,
    transformers_target: PreTrainedModel,
    drafter: ReferenceDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[tuple[list[int], list[int]]] = []
    original = ModelRank.step

    def spy(rank: ModelRank, inputs: StepInputs, captured: None) -> StepResult:
        drafts = rank.state.drafts[inputs.decode_slots].tolist()
        result = original(rank, inputs, captured)
        for row in inputs.decode_valid.nonzero().flatten().tolist():
            count = int(result.num_drafts[row])
            emitted = [token for token in result.sampled[row].tolist() if token >= 0]
            steps.append((drafts[row][:count], emitted))
        return result

    monkeypatch.setattr(ModelRank, "step", spy)
    lengths = []
    for prompt in short_prompts(llm, num_prompts(2)):
        trace = generate(transformers_target, drafter, prompt, MAX_TOKENS)
        steps.clear()
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
        assert list(output.token_ids) == trace.token_ids
        num_left = MAX_TOKENS - 1
        for (drafts, emitted), step in zip(steps, trace.steps, strict=True):
            # The oracle always verifies a whole block, the engine what may still be emitted.
            assert drafts == step.drafts[: num_left - 1]
            assert emitted == step.emitted
            num_left -= len(emitted)
        assert num_left == 0
        assert output.speculation.mean_acceptance_length == trace.mean_acceptance_length
        lengths.append(trace.mean_acceptance_length)
    assert max(lengths) > 1, "no draft was ever accepted, so acceptance was not tested"
