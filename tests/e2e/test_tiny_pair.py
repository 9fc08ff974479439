"""`make serve` with a random tiny pair: nothing in the server is made for the demo's sizes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.e2e import client
from tests.e2e.client import Answer
from tests.e2e.conftest import TINY_K, TINY_PROMPT
from tests.e2e.server import Server, serving
from tests.oracle.dflash_reference import Trace, generate, load_drafter
from tests.tiny import load_target

PROMPTS = [TINY_PROMPT, TINY_PROMPT[::-1], [7], list(range(100, 140))]
CHAT = "Hello, world"
MAX_TOKENS = 40
MODEL = "tiny"


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path]) -> Iterator[Server]:
    target, drafter = tiny_pair
    args: dict[str, Any] = {
        "model": str(target),
        "served_model_name": MODEL,
        # Every draft in every step, one step at a time, as the oracle: then verify steps are the
        # same, not only tokens.
        "speculative_config": {"method": "dflash", "model": str(drafter), "adaptive": False},
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "threads_per_shard": 1,
        "backend": "eager",
        "async_scheduling": False,
    }
    with serving(args) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: tuple[Path, Path]) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_pair[0])


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """`PROMPTS`, then `CHAT` through the template."""
    messages = client.user(CHAT)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [*PROMPTS, list(ids)]


@pytest.fixture(scope="module")
def traces(tiny_pair: tuple[Path, Path], prompts: list[list[int]]) -> list[Trace]:
    """What the oracle makes of `prompts`."""
    target, drafter = load_target(tiny_pair[0]), load_drafter(tiny_pair[1])
    traces = [generate(target, drafter, prompt, MAX_TOKENS) for prompt in prompts]
    assert max(trace.mean_acceptance_length for trace in traces) > 1.5
    return traces


def assert_as_traced(answer: Answer, trace: Trace, text: str) -> None:
    assert answer.text == text
    assert answer.finish_reason == "length"
    assert answer.usage["completion_tokens"] == MAX_TOKENS
    stats = answer.usage["speculative"]
    assert stats["verify_steps"] == len(trace.steps)
    assert stats["draft_tokens"] <= TINY_K * len(trace.steps)
    assert stats["mean_acceptance_length"] == pytest.approx(trace.mean_acceptance_length)


def test_grpc_gives_the_oracles_tokens(
    server: Server,
    prompts: list[list[int]],
    traces: list[Trace],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    def answers(prompt: list[int]) -> list[Answer]:
        request = client.grpc_tokens(prompt, max_tokens=MAX_TOKENS)
        return [client.grpc_complete(server, request), client.grpc_stream(server, request)]

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(answers, prompts))
    for both, trace in zip(together, traces, strict=True):
        text = tokenizer.decode(trace.token_ids, skip_special_tokens=True)
        for answer in both:
            assert list(answer.token_ids) == trace.token_ids
            assert_as_traced(answer, trace, text)


@pytest.mark.parametrize("send", [client.complete, client.stream])
def test_http_gives_the_text_of_the_oracles_tokens(
    server: Server,
    traces: list[Trace],
    tokenizer: PreTrainedTokenizerBase,
    send: Any,
) -> None:
    greedy = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
    answers = [send(server, "completions", {"prompt": prompt, **greedy}) for prompt in PROMPTS]
    answers.append(send(server, "chat/completions", {"messages": client.user(CHAT), **greedy}))
    for answer, trace in zip(answers, traces, strict=True):
        text = tokenizer.decode(trace.token_ids, skip_special_tokens=True)
        assert_as_traced(answer, trace, text)
