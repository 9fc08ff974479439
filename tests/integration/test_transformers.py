"""The demo pair against transformers: greedy tokens and logits in float32."""

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from actors.llm import LLM
from actors.messages import SamplingParams
from tests.integration.demo import (
    CONTINUATION,
    USER_MESSAGE,
    assert_same_tokens,
    num_prompts,
    short_prompts,
)

MAX_TOKENS = 32


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    return short_prompts(plain, num_prompts(3))


@pytest.fixture(scope="module")
def expected(transformers_target: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` of transformers makes of every prompt, alone."""
    greedy = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=2)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = transformers_target.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=greedy
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("engine", ["plain", "speculative"])
def test_tokens_equal_greedy_generation(
    engine: str,
    prompts: list[list[int]],
    expected: list[list[int]],
    request: pytest.FixtureRequest,
) -> None:
    llm: LLM = request.getfixturevalue(engine)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    for output, tokens, prompt in zip(outputs, expected, prompts, strict=True):
        assert_same_tokens(output.token_ids, tokens, prompt, llm.next_token_logits)


def test_logits_equal_those_of_transformers(
    plain: LLM, transformers_target: PreTrainedModel, prompts: list[list[int]]
) -> None:
    for prompt in prompts:
        with torch.inference_mode():
            theirs = transformers_target(torch.tensor([prompt])).logits[0, -1]
        ours = plain.next_token_logits(prompt)
        largest = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("engine", ["plain", "speculative"])
def test_the_reference_continuation(engine: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(engine)
    (output,) = llm.chat(
        [[{"role": "user", "content": USER_MESSAGE}]], SamplingParams(max_tokens=100)
    )
    assert output.text == CONTINUATION
    assert output.finish_reason == "stop"
