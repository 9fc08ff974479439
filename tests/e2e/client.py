"""A client over HTTP and gRPC that keeps what an answer says about itself."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx

from app.protos import dflash_pb2 as pb
from app.protos import dflash_pb2_grpc as pb_grpc
from benchmarks.server import Server

TIMEOUT_S = 180.0
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`token_ids` come over gRPC only; `usage` is in OpenAI's shape with our `speculative`."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    token_ids: tuple[int, ...] = ()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=TIMEOUT_S)


def complete(server: Server, path: str, body: dict[str, Any]) -> Answer:
    """An answer in one piece; `path` is `completions` or `chat/completions`."""
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if path.startswith("chat") else choice["text"]
    return Answer(text=text, finish_reason=choice["finish_reason"], usage=answer["usage"])


def stream(server: Server, path: str, body: dict[str, Any]) -> Answer:
    """A streamed answer, put together; checks the order of its events."""
    chat = path.startswith("chat")
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=TIMEOUT_S) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200, lines
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines.pop() == "data: [DONE]"
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert last["choices"] == []
    assert all(event["usage"] is None for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    if chat:
        assert choices[0]["delta"]["role"] == "assistant"
    texts = [c["delta"].get("content", "") if chat else c["text"] for c in choices]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return Answer(text="".join(texts), finish_reason=reasons[-1], usage=last["usage"])


@contextmanager
def stub_of(server: Server) -> Iterator[pb_grpc.DFlashStub]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield pb_grpc.DFlashStub(channel)


def grpc_chat(text: str, **fields: Any) -> pb.GenerateRequest:
    """Greedy, unless `fields` say otherwise."""
    messages = pb.Messages(messages=[pb.Message(role="user", content=text)])
    return pb.GenerateRequest(messages=messages, **{"temperature": 0.0, **fields})


def grpc_tokens(token_ids: list[int], **fields: Any) -> pb.GenerateRequest:
    """Greedy, unless `fields` say otherwise."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids), **{"temperature": 0.0, **fields}
    )


def grpc_complete(server: Server, request: pb.GenerateRequest) -> Answer:
    with stub_of(server) as stub:
        answer = stub.Generate(request, timeout=TIMEOUT_S)
    return Answer(
        text=answer.text,
        finish_reason=_REASONS[answer.finish_reason],
        usage=_usage(answer.usage),
        token_ids=tuple(answer.token_ids),
    )


def grpc_stream(server: Server, request: pb.GenerateRequest) -> Answer:
    with stub_of(server) as stub:
        chunks = list(stub.GenerateStream(request, timeout=TIMEOUT_S))
    assert not any(chunk.finish_reason or chunk.HasField("usage") for chunk in chunks[:-1])
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        finish_reason=_REASONS[chunks[-1].finish_reason],
        usage=_usage(chunks[-1].usage),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
    )


def _usage(usage: pb.Usage) -> dict[str, Any]:
    stats = usage.speculative
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "speculative": {
            "verify_steps": stats.verify_steps,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "mean_acceptance_length": (
                stats.mean_acceptance_length if stats.HasField("mean_acceptance_length") else None
            ),
        },
    }
