import asyncio
from typing import Any

import grpc
import pytest

from actors.config import EngineConfig
from actors.errors import EngineDead
from app.grpc_api import GrpcApi, is_local
from app.protos import dflash_pb2 as pb
from app.service import Service
from app.tokenizer import Tokenizer
from tests.unit.app.fakes import EOS, Recital


class Context:
    """What the methods use of Serve's gRPC context."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:50000") -> None:
        self._peer = peer
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def peer(self) -> str:
        return self._peer

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


@pytest.fixture
def make(config: EngineConfig, tokenizer: Tokenizer) -> Any:
    def api(engine: Recital, *, remote: bool = False) -> GrpcApi:
        return GrpcApi(Service(config, tokenizer, engine), remote=remote)

    return api


def unary(api: GrpcApi, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
    return asyncio.run(api.generate(request, context))


def streamed(api: GrpcApi, request: pb.GenerateRequest, context: Any) -> list[pb.GenerateChunk]:
    async def run() -> list[pb.GenerateChunk]:
        return [chunk async for chunk in api.generate_stream(request, context)]

    return asyncio.run(run())


def inputs(tokenizer: Tokenizer) -> list[tuple[pb.GenerateRequest, list[int]]]:
    """The three kinds of input, each with the prompt it makes."""
    ids = tokenizer.encode("hello")
    message = pb.Message(role="user", content="hello")
    return [
        (pb.GenerateRequest(prompt="hello"), ids),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)), ids),
        (
            pb.GenerateRequest(messages=pb.Messages(messages=[message])),
            tokenizer.encode_chat([{"role": "user", "content": "hello"}]),
        ),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_both_methods_give_the_same(make: Any, tokenizer: Tokenizer, kind: int) -> None:
    tokens = tokenizer.encode(f"日本 the cat{EOS}")
    engine = Recital(tokens, width=2)
    request, prompt = inputs(tokenizer)[kind]
    whole = unary(make(engine), request, Context())
    chunks = streamed(make(engine), request, Context())
    assert [r.prompt_token_ids for r in engine.requests] == [tuple(prompt)] * 2
    assert whole.text == "".join(chunk.text for chunk in chunks) == "日本 the cat"
    assert list(whole.token_ids) == [t for chunk in chunks for t in chunk.token_ids] == tokens
    assert whole.finish_reason == chunks[-1].finish_reason == pb.FINISH_REASON_STOP
    assert whole.usage == chunks[-1].usage
    assert whole.usage.completion_tokens == len(tokens)
    assert whole.usage.speculative.mean_acceptance_length == 25.0
    assert not any(chunk.HasField("usage") or chunk.finish_reason for chunk in chunks[:-1])
    assert engine.num_closed == 2


def test_parameters_act(make: Any, tokenizer: Tokenizer) -> None:
    engine = Recital(tokenizer.encode("one two"), finish_reason="length")
    request = pb.GenerateRequest(
        prompt="hello", max_tokens=9, stop_token_ids=[5], ignore_eos=True, stop=["two"]
    )
    response = unary(make(engine), request, Context())
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (9, (5,), True)
    assert (response.text, response.finish_reason) == ("one ", pb.FINISH_REASON_STOP)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(messages=pb.Messages()), grpc.StatusCode.INVALID_ARGUMENT),
        (
            pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="robot")])),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (pb.GenerateRequest(prompt="x", max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(prompt="x", stop=[""]), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(prompt="日" * 99), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(prompt="x", model="gpt-4"), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_refusals(make: Any, request_: pb.GenerateRequest, code: grpc.StatusCode) -> None:
    for method in (unary, streamed):
        context = Context()
        # Whatever it is: clients see the status only.
        with pytest.raises(Exception):  # noqa: B017, PT011
            method(make(Recital([])), request_, context)
        assert context.code == code
        assert context.details


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDead("gone"), grpc.StatusCode.UNAVAILABLE),
        (ValueError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
def test_errors_of_the_engine(make: Any, error: Exception, code: grpc.StatusCode) -> None:
    for method in (unary, streamed):
        context = Context()
        with pytest.raises(type(error)):
            method(make(Recital([70], error=error)), pb.GenerateRequest(prompt="x"), context)
        assert context.code == code
        assert "secret" not in context.details


def test_a_client_that_leaves_closes_the_engine_stream(make: Any, tokenizer: Tokenizer) -> None:
    engine = Recital(tokenizer.encode("the cat sat"), width=1)
    context: Any = Context()

    async def leave() -> None:
        stream = make(engine).generate_stream(pb.GenerateRequest(prompt="x"), context)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert engine.num_closed == 1
    assert context.code is None


def test_peers_on_other_machines_are_refused_unless_allowed(make: Any) -> None:
    request = pb.GenerateRequest(prompt="x")
    context = Context("ipv4:10.0.0.5:50000")
    with pytest.raises(Exception, match="this machine only"):
        unary(make(Recital([70, 1])), request, context)
    assert context.code == grpc.StatusCode.PERMISSION_DENIED
    assert unary(make(Recital([70, 1]), remote=True), request, Context("ipv4:10.0.0.5:1")).id


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:50000", True),
        ("ipv4:127.8.9.1:50000", True),
        ("ipv6:[::1]:50000", True),
        ("ipv6:%5B::1%5D:50000", True),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        ("unix:/run/socket", True),
        ("unix:", True),
        ("ipv4:10.0.0.1:50000", False),
        ("ipv4:0.0.0.0:50000", False),
        ("ipv6:[::ffff:10.0.0.1]:50000", False),
        ("ipv6:[fe80::1%25eth0]:50000", False),
        ("ipv6:[2001:db8::1]:127", False),
        ("dns:localhost:50000", False),
        ("127.0.0.1:50000", False),
        ("", False),
    ],
)
def test_which_peers_are_local(peer: str, local: bool) -> None:
    assert is_local(peer) is local
