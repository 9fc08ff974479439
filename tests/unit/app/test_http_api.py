import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError

from actors.config import EngineConfig
from actors.errors import EngineDead, RequestRejected
from app.http_api import HttpApi
from app.service import Engine, Service
from app.tokenizer import Tokenizer
from tests.unit.app.fakes import EOS, Recital

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
SPECULATIVE = {
    "verify_steps": 2,
    "draft_tokens": 60,
    "accepted_tokens": 30,
    "mean_acceptance_length": 25.0,
}

MakeApp = Callable[..., FastAPI]


async def healthy() -> None:
    return


async def unhealthy() -> None:
    raise RuntimeError("a shard is dead")


@pytest.fixture
def make_app(config: EngineConfig, tokenizer: Tokenizer) -> MakeApp:
    def make(engine: Engine, check: Any = healthy, tokenizer: Tokenizer = tokenizer) -> FastAPI:
        return HttpApi(Service(config, tokenizer, engine), check).build()

    return make


def call(app: FastAPI, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(run())


def events(response: httpx.Response) -> list[Any]:
    """The decoded events; `[DONE]` stays a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    data = [
        part.removeprefix("data: ") for part in response.text.removesuffix("\n\n").split("\n\n")
    ]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def test_a_chat(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"the cat 日本{EOS}")
    engine = Recital(tokens, cached_tokens=5)
    response = call(make_app(engine), "POST", "/v1/chat/completions", json=CHAT)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    num_prompt = len(tokenizer.encode_chat(CHAT["messages"]))
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "the cat 日本", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(tokens),
            "total_tokens": num_prompt + len(tokens),
            "prompt_tokens_details": {"cached_tokens": 5},
            "speculative": SPECULATIVE,
        },
    }


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_completion(make_app: MakeApp, tokenizer: Tokenizer, as_ids: bool) -> None:
    prompt = tokenizer.encode("hello")
    engine = Recital(tokenizer.encode(" world"), finish_reason="length")
    body = COMPLETION | ({"prompt": prompt} if as_ids else {})
    answer = call(make_app(engine), "POST", "/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": " world", "logprobs": None, "finish_reason": "length"}
    ]
    assert engine.requests[0].prompt_token_ids == tuple(prompt)
    assert engine.requests[0].sampling.max_tokens == 16
    assert engine.requests[0].request_id == f"{answer['id']}-0"


@BOTH
def test_a_stream_with_usage(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    text = "日本\u2028 the end"
    tokens = tokenizer.encode(text + EOS)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = call(make_app(Recital(tokens, width=1)), "POST", path, json=body | options)
    *chunks, usage, done = events(response)
    assert response.text.isascii()
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(tokens)
    assert usage["usage"]["speculative"] == SPECULATIVE
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in [*chunks, usage]}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    if body is CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
        texts = [c["delta"]["content"] for c in choices[1:-1]]
    else:
        texts = [c["text"] for c in choices[:-1]]
    assert "".join(texts) == text
    assert all(texts)


@BOTH
def test_a_stream_without_usage(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    app = make_app(Recital(tokenizer.encode(f"hello{EOS}")))
    *chunks, done = events(call(app, "POST", path, json=body | {"stream": True}))
    assert done == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_the_limit_goes_by_either_name(make_app: MakeApp) -> None:
    engine = Recital([70, 1])
    app = make_app(engine)
    for name in ("max_tokens", "max_completion_tokens"):
        call(app, "POST", "/v1/chat/completions", json=CHAT | {name: 7})
        response = call(app, "POST", "/v1/chat/completions", json=CHAT | {name: 64})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert [request.sampling.max_tokens for request in engine.requests] == [7, 7]


def test_models_and_health(make_app: MakeApp) -> None:
    app = make_app(Recital([]))
    models = call(app, "GET", "/v1/models").json()
    assert [(m["id"], m["object"]) for m in models["data"]] == [("tiny", "model")]
    assert call(app, "GET", "/health").status_code == 200
    sick = call(make_app(Recital([]), unhealthy), "GET", "/health")
    assert (sick.status_code, sick.json()["error"]["code"]) == (503, "engine_unavailable")


@BOTH
@pytest.mark.parametrize(
    ("changes", "status", "param", "code"),
    [
        ({"temperature": 2.5}, 400, "temperature", None),
        ({"nonsense": 1}, 400, "nonsense", None),
        ({"model": "gpt-4"}, 404, "model", "model_not_found"),
        ({"max_tokens": 1000}, 400, "max_tokens", None),
        ({"stop_token_ids": [300]}, 400, "stop_token_ids", None),
    ],
)
def test_refusals(
    make_app: MakeApp,
    path: str,
    body: dict[str, Any],
    changes: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
) -> None:
    response = call(
        make_app(Recital([])),
        "POST",
        path,
        content=json.dumps(body | changes),
        headers={"content-type": "application/json"},
    )
    error = response.json()["error"]
    assert response.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        rb'{"\ud800": 1}',
        b'{"model": "tiny"}',
    ],
)
def test_bodies_that_are_no_request(make_app: MakeApp, content: bytes) -> None:
    response = call(
        make_app(Recital([])),
        "POST",
        "/v1/completions",
        content=content,
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long(make_app: MakeApp) -> None:
    body = COMPLETION | {"prompt": "日" * 100}
    response = call(make_app(Recital([])), "POST", "/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    assert "prompt has 300 tokens, the limit is 63" in response.json()["error"]["message"]


def test_a_model_without_a_chat_template(make_app: MakeApp, templateless: Tokenizer) -> None:
    app = make_app(Recital([70, 1]), tokenizer=templateless)
    response = call(app, "POST", "/v1/chat/completions", json=CHAT)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
    assert call(app, "POST", "/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
def test_unknown_routes(make_app: MakeApp, method: str, path: str, status: int) -> None:
    response = call(make_app(Recital([])), method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (EngineDead("gone"), 503, None),
        (BackPressureError(9, 9), 503, "1"),
        (RequestRejected("too many pages", "prompt"), 400, None),
        (RayTaskError("f", "traceback", EngineDead("gone")).as_instanceof_cause(), 503, None),
        (ValueError("secret"), 500, None),
    ],
)
def test_errors_before_the_first_token_have_a_status(
    make_app: MakeApp,
    path: str,
    body: dict[str, Any],
    stream: bool,
    error: Exception,
    status: int,
    retry_after: str | None,
) -> None:
    app = make_app(Recital([], error=error))
    response = call(
        app, "POST", path, json=body | {"stream": stream}, headers={"x-request-id": "abc"}
    )
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    message = response.json()["error"]["message"]
    assert "secret" not in message
    assert "traceback" not in message
    assert ("abc" in message) == (status == 500)


@BOTH
def test_an_error_in_the_middle_ends_the_stream(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    engine = Recital(tokenizer.encode("the cat"), error=EngineDead("gone"))
    response = call(make_app(engine), "POST", path, json=body | {"stream": True})
    *chunks, last = events(response)
    assert response.status_code == 200
    assert all("choices" in chunk for chunk in chunks)
    assert last["error"]["code"] == "engine_unavailable"
    assert engine.num_closed == 1


@BOTH
def test_a_client_that_leaves_closes_the_engine_stream(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    engine = Recital(tokenizer.encode("the cat sat on the mat"), width=1)
    app = make_app(engine)

    async def run() -> None:
        sent: list[Any] = []
        gone = asyncio.Event()
        request = [{"type": "http.request", "body": json.dumps(body | {"stream": True}).encode()}]

        async def receive() -> Any:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                gone.set()
                await asyncio.Event().wait()  # a peer that takes no more

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await asyncio.wait_for(app(scope, receive, send), 5)
        assert len(sent) == 3

    asyncio.run(run())
    assert engine.num_closed == 1
