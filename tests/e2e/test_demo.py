"""`make serve` with the demo pair in float32, met by every kind of client."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import jsonschema
import openai
import pytest

from app.protos import dflash_pb2 as pb
from benchmarks.server import Server, serving
from models.hub import DEMO_TARGET
from tests.e2e import client
from tests.e2e.client import Answer, user
from tests.e2e.metrics import metrics_of
from tests.integration.demo import CONTINUATION, USER_MESSAGE, demo_args, short_texts

MAX_MODEL_LEN = 2048
K = 9
WAIT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(demo_args(max_model_len=MAX_MODEL_LEN, num_kv_pages=None)) as server:
        yield server


def body(text: str, **fields: Any) -> dict[str, Any]:
    """Greedy, unless `fields` say otherwise."""
    return {"model": DEMO_TARGET, "messages": user(text), "temperature": 0, **fields}


def assert_soon(what: Callable[[], object], expected: object) -> None:
    """Counters reach Prometheus with a delay."""
    deadline = time.monotonic() + WAIT_S
    while (found := what()) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    assert found == expected


# First, so that the counters hold this test's requests only.
def test_metrics_equal_what_clients_counted(server: Server) -> None:
    def chat(text: str) -> Answer:
        return client.stream(server, "chat/completions", body(text, max_tokens=20))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(chat, short_texts(4)))
    answers += [
        client.complete(server, "chat/completions", body(USER_MESSAGE)),
        client.complete(
            server,
            "completions",
            {"model": DEMO_TARGET, "prompt": "One, two,", "max_tokens": 1, "temperature": 0},
        ),
        client.grpc_complete(server, client.grpc_chat("Count to ten.", max_tokens=12)),
        client.grpc_stream(server, client.grpc_chat("Count to ten.", max_tokens=2)),
    ]
    counted: Counter[str] = Counter()
    for answer in answers:
        usage, stats = answer.usage, answer.usage["speculative"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        # The first token comes from prefill, all others from verify steps.
        verified = usage["completion_tokens"] - 1
        assert stats["accepted_tokens"] == verified - stats["verify_steps"]
        expected = verified / stats["verify_steps"] if verified else None
        assert stats["mean_acceptance_length"] == expected
        assert stats["draft_tokens"] <= K * stats["verify_steps"]
        counted["prompt_tokens"] += usage["prompt_tokens"]
        counted["prefix_cache_queries"] += usage["prompt_tokens"]
        counted["prefix_cache_hits"] += usage["prompt_tokens_details"]["cached_tokens"]
        counted["output_tokens"] += usage["completion_tokens"]
        for name in ("verify_steps", "draft_tokens", "accepted_tokens"):
            counted[name] += stats[name]
    outcomes = Counter(answer.finish_reason for answer in answers)
    assert set(outcomes) == {"stop", "length"}
    assert counted["accepted_tokens"] > 0

    def published() -> dict[str, Any]:
        found = metrics_of(server)
        per_position = found.pop("accepted_tokens_per_position", {})
        return {
            "requests": found.pop("requests", {}),
            "per position": sum(per_position.values()),
            **{name: series[""] for name, series in found.items()},
        }

    per_position = counted["accepted_tokens"]
    assert_soon(published, {"requests": outcomes, "per position": per_position, **counted})
    by_position = metrics_of(server)["accepted_tokens_per_position"]
    counts = [by_position.get(str(position), 0) for position in range(K)]
    assert set(by_position) <= {str(position) for position in range(K)}
    assert counts == sorted(counts, reverse=True), "accepted behind a rejected draft"


# ------------------------------------------------------------------- the reference continuation


def over_openai(server: Server, *, stream: bool) -> str:
    """OpenAI's own client; a streamed answer ends with its usage."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        messages: Any = user(USER_MESSAGE)
        if not stream:
            answer = api.chat.completions.create(
                model=DEMO_TARGET, messages=messages, temperature=0
            )
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 49
            return answer.choices[0].message.content or ""
        chunks = list(
            api.chat.completions.create(
                model=DEMO_TARGET,
                messages=messages,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    *deltas, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 49
    assert deltas[-1].choices[0].finish_reason == "stop"
    # More than the chunks that open and close it: it came bit by bit.
    assert len(deltas) > 5
    return "".join(chunk.choices[0].delta.content or "" for chunk in deltas)


CLIENTS: dict[str, Callable[[Server], str]] = {
    "http": lambda s: client.complete(s, "chat/completions", body(USER_MESSAGE)).text,
    "http streamed": lambda s: client.stream(s, "chat/completions", body(USER_MESSAGE)).text,
    "openai": lambda s: over_openai(s, stream=False),
    "openai streamed": lambda s: over_openai(s, stream=True),
    "grpc": lambda s: client.grpc_complete(s, client.grpc_chat(USER_MESSAGE)).text,
    "grpc streamed": lambda s: client.grpc_stream(s, client.grpc_chat(USER_MESSAGE)).text,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_gets_the_reference_continuation(server: Server, name: str) -> None:
    assert CLIENTS[name](server) == CONTINUATION


# ------------------------------------------------------------------------------------- guides

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "milk"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
ANNA = "Describe Anna, who is 31 and likes tea and milk, in JSON."
CITY = 'Answer with a JSON object with the keys "city" and "country": where is the Eiffel Tower?'


def guided_over_openai(server: Server, *, stream: bool, **fields: Any) -> Any:
    """What OpenAI's own client gets, read as JSON; it has to come to its end."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        if not stream:
            (choice,) = api.chat.completions.create(**fields).choices
            text, reason = choice.message.content or "", choice.finish_reason
        else:
            chunks = list(api.chat.completions.create(**fields, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
    assert reason == "stop"
    return json.loads(text)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_gets_json(server: Server, stream: bool) -> None:
    for temperature in (0, 1):
        sampling = {"temperature": temperature, "seed": 2, "response_format": BY_SCHEMA}
        found = guided_over_openai(server, stream=stream, **body(ANNA, **sampling))
        jsonschema.validate(found, SCHEMA)
    free = body(CITY, response_format={"type": "json_object"})
    assert isinstance(guided_over_openai(server, stream=stream, **free), dict)


GUIDES: dict[str, tuple[dict[str, Any], pb.Guide, str]] = {
    # over HTTP, over gRPC, what the text looks like
    "regex": (
        {"guided_regex": "[0-9]{3}-[0-9]{4}"},
        pb.Guide(regex="[0-9]{3}-[0-9]{4}"),
        "[0-9]{3}-[0-9]{4}",
    ),
    "choice": (
        {"guided_choice": ["yes", "no", "not at all"]},
        pb.Guide(choices=pb.Choices(choices=["yes", "no", "not at all"])),
        "yes|no|not at all",
    ),
    "schema": (
        {"structured_outputs": {"json": SCHEMA}},
        pb.Guide(json_schema=json.dumps(SCHEMA)),
        r"\{.*\}",
    ),
}


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_holds_over_every_protocol_with_speculation_and_without(
    server: Server, name: str
) -> None:
    fields, guide, pattern = GUIDES[name]
    request = client.grpc_chat(ANNA, guide=guide)
    answers = [
        client.complete(server, "chat/completions", body(ANNA, **fields)),
        client.stream(server, "chat/completions", body(ANNA, **fields)),
        client.grpc_complete(server, request),
        client.grpc_stream(server, request),
        client.complete(
            server, "chat/completions", body(ANNA, speculative={"enabled": False}, **fields)
        ),
    ]
    assert re.fullmatch(pattern, answers[0].text)
    assert {(answer.text, answer.finish_reason) for answer in answers} == {
        (answers[0].text, "stop")
    }


# ------------------------------------------------------------------------------- concurrency


def test_eight_streams_together_equal_one_at_a_time(server: Server) -> None:
    def chat(text: str) -> tuple[str, str]:
        answer = client.stream(server, "chat/completions", body(text, max_tokens=20))
        return answer.text, answer.finish_reason

    texts = short_texts(8)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(chat, texts))
    assert together == [chat(text) for text in texts]
    assert len(set(together)) == 8


# ---------------------------------------------------------------------------------- bad input


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": DEMO_TARGET, "prompt": "Hello", **fields}


BAD: dict[str, tuple[str, Any, int, str | None]] = {
    # path, body, status, param
    "prompt over the limit": (
        "completions", completion(prompt=[5] * MAX_MODEL_LEN), 400, "prompt",
    ),
    "messages over the limit": (
        "chat/completions", body("word " * MAX_MODEL_LEN), 400, "messages",
    ),
    "no room for max_tokens": (
        "completions", completion(max_tokens=MAX_MODEL_LEN), 400, "max_tokens",
    ),
    "token outside the vocabulary": ("completions", completion(prompt=[49152]), 400, "prompt"),
    "unknown field": ("chat/completions", body("Hi", max_token=5), 400, "max_token"),
    "wrong type": ("chat/completions", body("Hi", max_tokens="five"), 400, "max_tokens"),
    "messages of a wrong type": (
        "chat/completions", {"model": DEMO_TARGET, "messages": "Hi"}, 400, "messages",
    ),
    "no messages": ("chat/completions", {"model": DEMO_TARGET, "messages": []}, 400, "messages"),
    "no prompt": ("completions", {"model": DEMO_TARGET}, 400, "prompt"),
    "temperature": ("chat/completions", body("Hi", temperature=2.5), 400, "temperature"),
    "schema that is none": (
        "chat/completions",
        body(
            "Hi",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            },
        ),
        400,
        "response_format",
    ),
    "regex that is none": ("chat/completions", body("Hi", guided_regex="("), 400, "guided_regex"),
    "unknown model": ("chat/completions", body("Hi") | {"model": "gpt-4"}, 404, "model"),
    "invalid JSON": ("chat/completions", b'{"model": ', 400, None),
    "not an object": ("chat/completions", [1, 2], 400, None),
    "unknown path": ("embeddings", {}, 404, None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_over_http(server: Server, name: str, stream: bool) -> None:
    path, content, status, param = BAD[name]
    if isinstance(content, bytes):
        sent: dict[str, Any] = {"content": content}
    elif stream and isinstance(content, dict):
        sent = {"json": {**content, "stream": True}}
    else:
        sent = {"json": content}
    response = httpx.post(
        f"{server.url}/v1/{path}",
        headers={"content-type": "application/json"},
        timeout=client.TIMEOUT_S,
        **sent,
    )
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (client.grpc_tokens([5] * MAX_MODEL_LEN), grpc.StatusCode.INVALID_ARGUMENT),
        (client.grpc_chat("word " * MAX_MODEL_LEN), grpc.StatusCode.INVALID_ARGUMENT),
        (client.grpc_tokens([49152]), grpc.StatusCode.INVALID_ARGUMENT),
        (client.grpc_chat("Hi", max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT),
        (client.grpc_chat("Hi", max_tokens=MAX_MODEL_LEN), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(messages=pb.Messages()), grpc.StatusCode.INVALID_ARGUMENT),
        (
            client.grpc_chat("Hi", guide=pb.Guide(json_schema='{"type": "nonsense"}')),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (client.grpc_chat("Hi", guide=pb.Guide(regex="(")), grpc.StatusCode.INVALID_ARGUMENT),
        (client.grpc_chat("Hi", model="gpt-4"), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_bad_input_over_grpc(
    server: Server, request_: pb.GenerateRequest, code: grpc.StatusCode
) -> None:
    for send in (client.grpc_complete, client.grpc_stream):
        with pytest.raises(grpc.RpcError) as error:
            send(server, request_)
        assert error.value.code() == code
        assert error.value.details()


# --------------------------------------------------------------------------------- disconnects


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    endless = {"max_tokens": 1900, "ignore_eos": True}
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        json=body("Tell me a story.", stream=True, **endless),
        timeout=client.TIMEOUT_S,
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        assert [next(lines) for _ in range(5)]
    with client.stub_of(server) as stub:
        # A deadline, not a cancelled stream: the proxy may miss one that comes while it writes.
        with pytest.raises(grpc.RpcError) as error:
            stub.Generate(client.grpc_chat("Tell me a story.", **endless), timeout=3)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert_soon(lambda: metrics_of(server).get("requests", {}).get("abort"), 2)
    assert CLIENTS["http"](server) == CONTINUATION


# Behind the count of aborts: the engine learns of a stop string's end by one.
@pytest.mark.parametrize("stop", ["carbon dioxide", ". This process is", "Photo", "ecosystems."])
def test_a_stop_string_ends_text_tokens_and_counters(server: Server, stop: str) -> None:
    fields: dict[str, Any] = {"stop": [stop, "never"]}
    request = client.grpc_chat(USER_MESSAGE, **fields)
    answers = [
        client.complete(server, "chat/completions", body(USER_MESSAGE, **fields)),
        client.stream(server, "chat/completions", body(USER_MESSAGE, **fields)),
        client.grpc_complete(server, request),
        client.grpc_stream(server, request),
    ]
    assert len({answer.usage["completion_tokens"] for answer in answers}) == 1
    assert answers[2].token_ids == answers[3].token_ids
    assert len(answers[2].token_ids) == answers[2].usage["completion_tokens"]
    for answer in answers:
        assert answer.text == CONTINUATION[: CONTINUATION.index(stop)]
        assert answer.finish_reason == "stop"
        stats, verified = answer.usage["speculative"], answer.usage["completion_tokens"] - 1
        assert stats["accepted_tokens"] == verified - stats["verify_steps"]
        assert 0 <= stats["accepted_tokens"] <= stats["draft_tokens"] <= K * stats["verify_steps"]


def test_health_and_models(server: Server) -> None:
    assert httpx.get(f"{server.url}/health", timeout=client.TIMEOUT_S).status_code == 200
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=client.TIMEOUT_S).json()["data"]
    assert model["id"] == DEMO_TARGET
    assert model["max_model_len"] == MAX_MODEL_LEN
