"""`make serve` with a random tiny pair: nothing in the server is made for the demo's sizes."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from actors.messages import SamplingParams
from benchmarks.server import Server, serving
from tests.e2e import client
from tests.e2e.client import Answer
from tests.e2e.conftest import TINY_K, TINY_PROMPT
from tests.oracle.dflash_reference import Trace, generate, load_drafter
from tests.oracle.plain_sampling import all_logits, sample_plainly
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


# ----------------------------------------------------------------------------- request fields


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> PreTrainedModel:
    return load_target(tiny_pair[0])


def completion(**fields: Any) -> dict[str, Any]:
    """What the server is asked for; its answers have token ids."""
    asked = {"model": MODEL, "prompt": TINY_PROMPT, "max_tokens": MAX_TOKENS, **fields}
    return {**asked, "return_token_ids": True}


def choices(server: Server, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(server, "completions", completion(**fields))
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


PENALTIES: dict[str, Any] = {
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.2,
}
SHAPED: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0.0, **PENALTIES},
    "all": {
        "temperature": 0.8,
        "seed": -7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.001,
        "min_tokens": 30,
        **PENALTIES,
    },
}


@pytest.mark.parametrize("name", SHAPED)
def test_sampling_fields_act_on_every_token(
    server: Server, target: PreTrainedModel, traces: list[Trace], name: str
) -> None:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, **SHAPED[name])
    expected = sample_plainly(target, TINY_PROMPT, sampling)
    assert expected != traces[0].token_ids
    (choice,) = choices(server, **SHAPED[name])
    assert choice["token_ids"] == expected
    found = client.grpc_stream(
        server, client.grpc_tokens(TINY_PROMPT, max_tokens=MAX_TOKENS, **SHAPED[name])
    )
    assert list(found.token_ids) == expected


def test_a_seed_decides_alone(server: Server) -> None:
    """Whatever runs beside it, and for each of several choices."""

    def ask(seed: int | None) -> list[list[int]]:
        return [choice["token_ids"] for choice in choices(server, n=2, seed=seed)]

    with ThreadPoolExecutor(4) as pool:
        (one, drawn, two, also_drawn), (one_again, *_) = (
            list(pool.map(ask, [1, None, 2, None])) for _ in range(2)
        )
    assert one == one_again == ask(1)
    assert two == ask(2)
    (first,) = choices(server, seed=1)
    assert first["token_ids"] == one[0]
    outputs = [tuple(tokens) for found in (one, drawn, two, also_drawn) for tokens in found]
    assert len(set(outputs)) == 8


def test_log_probabilities_are_the_targets(
    server: Server, target: PreTrainedModel, traces: list[Trace]
) -> None:
    """With speculation and without."""
    tokens = traces[0].token_ids
    logits = all_logits(target, [*TINY_PROMPT, *tokens])[len(TINY_PROMPT) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    expected = logprobs[range(len(tokens)), tokens].tolist()
    best = logprobs.max(-1).values.tolist()
    for speculative in ({"enabled": True}, {"enabled": False}):
        (choice,) = choices(server, temperature=0, logprobs=2, speculative=speculative)
        found = choice["logprobs"]
        assert choice["token_ids"] == tokens
        assert found["token_logprobs"] == pytest.approx(expected, abs=1e-3)
        tops = [max(top.values()) for top in found["top_logprobs"]]
        assert tops == pytest.approx(best, abs=1e-3)
    chat = {"model": MODEL, "messages": client.user(CHAT), "max_tokens": 9, "temperature": 0}
    body = {**chat, "logprobs": True, "top_logprobs": 3}
    answer = client.post(server, "chat/completions", body).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 9
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}


@pytest.mark.parametrize("send", [client.complete, client.stream])
def test_a_prompt_is_cached_for_its_salt(server: Server, send: Any) -> None:
    salts = [f"{send.__name__} {name}" for name in ("mine", "mine", "other")]
    answers = [
        send(server, "completions", completion(temperature=0, cache_salt=salt)) for salt in salts
    ]
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    # Whole pages of 4 tokens; the last token of a prompt is always computed.
    assert cached == [0, 8, 0]
    assert len({answer.text for answer in answers}) == 1
    cold, warm, _ = (answer.usage["speculative"] for answer in answers)
    assert cold == warm, "the drafter's context comes back with the cache"
    request = client.grpc_tokens(TINY_PROMPT, max_tokens=MAX_TOKENS, cache_salt=salts[0])
    found = client.grpc_complete(server, request)
    assert found.usage["prompt_tokens_details"] == {"cached_tokens": 8}


@pytest.mark.parametrize(
    ("speculative", "most"),
    [({"enabled": False}, 0), ({"max_draft_tokens": 0}, 0), ({"max_draft_tokens": 2}, 2)],
)
def test_a_request_bounds_its_drafts(
    server: Server, traces: list[Trace], speculative: dict[str, Any], most: int
) -> None:
    answers = [
        client.complete(server, "completions", completion(temperature=0, speculative=speculative)),
        client.grpc_complete(
            server,
            client.grpc_tokens(TINY_PROMPT, max_tokens=MAX_TOKENS, max_draft_tokens=most),
        ),
    ]
    assert answers[1].token_ids == tuple(traces[0].token_ids)
    assert answers[0].text == answers[1].text
    for answer in answers:
        stats = answer.usage["speculative"]
        steps, verified = stats["verify_steps"], MAX_TOKENS - 1
        assert stats["draft_tokens"] <= most * steps
        assert (stats["draft_tokens"] > 0) == (stats["accepted_tokens"] > 0) == (most > 0)
        assert stats["accepted_tokens"] == verified - steps
        assert stats["mean_acceptance_length"] == pytest.approx(verified / steps)
        assert steps >= len(traces[0].steps)


def test_a_lower_priority_goes_first(server: Server) -> None:
    """Three long requests hold all slots, of which one becomes free first."""
    begun, ended = threading.Semaphore(0), []

    def hold(max_tokens: int) -> None:
        request = client.grpc_tokens([max_tokens % 250], max_tokens=max_tokens)
        with client.stub_of(server) as stub:
            for index, _ in enumerate(stub.GenerateStream(request, timeout=client.TIMEOUT_S)):
                if index == 0:
                    begun.release()

    def ask(priority: int) -> None:
        client.complete(server, "completions", completion(priority=priority))
        ended.append(priority)

    with ThreadPoolExecutor(5) as pool:
        tasks = [pool.submit(hold, max_tokens) for max_tokens in (400, 700, 701)]
        for _ in tasks:
            assert begun.acquire(timeout=client.TIMEOUT_S)
        tasks += [pool.submit(ask, priority) for priority in (1, -1)]
        for task in tasks:
            task.result()
    assert ended == [-1, 1]
