import asyncio
from typing import Any

import grpc
import pytest

from actors.config import EngineConfig
from actors.errors import EngineDead
from actors.messages import Guide, SamplingParams
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
    ("sent", "changed"),
    [
        ({}, {}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 3}, {"top_k": 3}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"seed": 0}, {"seed": 0}),
        ({"presence_penalty": 1.0}, {"presence_penalty": 1.0}),
        ({"frequency_penalty": -1.0}, {"frequency_penalty": -1.0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {9: -3.0}}, {"logit_bias": ((9, -3.0),)}),
        ({"min_tokens": 1}, {"min_tokens": 1}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
        ({"guide": pb.Guide(json_object=True)}, {"guide": Guide(kind="json_object")}),
        ({"guide": pb.Guide(json_object=False)}, {}),
        (
            {"guide": pb.Guide(json_schema="{}")},
            {"guide": Guide(kind="json_schema", source="{}")},
        ),
        ({"guide": pb.Guide(regex="a+")}, {"guide": Guide(kind="regex", source="a+")}),
        ({"guide": pb.Guide(grammar="x")}, {"guide": Guide(kind="grammar", source="x")}),
        (
            {"guide": pb.Guide(choices=pb.Choices(choices=["a", "b."]))},
            {"guide": Guide(kind="regex", source=r"a|b\.")},
        ),
    ],
)
def test_sampling_fields_reach_the_engine(
    make: Any, sent: dict[str, Any], changed: dict[str, Any]
) -> None:
    engine = Recital([70, 1])
    unary(make(engine), pb.GenerateRequest(prompt="hello", max_tokens=9, **sent), Context())
    found = engine.requests[0].sampling
    # Random where it is absent.
    changed = {"seed": found.seed} | changed
    assert found == SamplingParams(**{"max_tokens": 9, "temperature": 1.0, **changed})


def test_scheduling_fields_reach_the_engine(make: Any, tokenizer: Tokenizer) -> None:
    engine = Recital([70, 1])
    fields: dict[str, Any] = {
        "priority": -2,
        "cache_salt": "mine",
        "max_draft_tokens": 0,
        "bad_words": ["the"],
    }
    for request in (pb.GenerateRequest(prompt="x", **fields), pb.GenerateRequest(prompt="x")):
        unary(make(engine), request, Context())
    found = [(r.priority, r.cache_salt, r.max_draft_tokens) for r in engine.requests]
    assert found == [(-2, "mine", 0), (0, "", None)]
    forms = tokenizer.encode_banned("the")
    assert engine.requests[0].sampling.bad_words == tuple(map(tuple, forms))


def test_log_probabilities_are_told(make: Any, tokenizer: Tokenizer) -> None:
    engine = Recital(tokenizer.encode("日!" + EOS), width=2, cached_tokens=2)
    request = pb.GenerateRequest(prompt="hello", logprobs=2, prompt_logprobs=1)
    whole = unary(make(engine), request, Context())
    chunks = streamed(make(engine), request, Context())
    assert [entry.token_id for entry in whole.logprobs] == list(engine.tokens)
    assert b"".join(entry.token for entry in whole.logprobs) == f"日!{EOS}".encode()
    assert [entry.logprob for entry in whole.logprobs] == [-t / 8 for t in engine.tokens]
    assert [entry.rank for entry in whole.logprobs] == [5] * 5
    assert [(top.token_id, top.logprob) for top in whole.logprobs[0].top] == [(60, 0), (61, -0.25)]
    first, *others = whole.prompt_logprobs
    prompt = engine.requests[0].prompt_token_ids
    assert [entry.token_id for entry in whole.prompt_logprobs] == list(prompt)
    assert not first.HasField("logprob")
    assert [entry.logprob for entry in others] == [-token / 8 for token in prompt[1:]]
    assert [e for chunk in chunks for e in chunk.logprobs] == list(whole.logprobs)
    assert list(chunks[0].prompt_logprobs) == list(whole.prompt_logprobs)
    assert not any(chunk.prompt_logprobs for chunk in chunks[1:])
    assert whole.usage.cached_tokens == chunks[-1].usage.cached_tokens == 2
    plain = unary(make(engine), pb.GenerateRequest(prompt="hello"), Context())
    assert not plain.logprobs
    assert not plain.prompt_logprobs


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
        *(
            (pb.GenerateRequest(prompt="x", **fields), grpc.StatusCode.INVALID_ARGUMENT)
            for fields in [
                {"temperature": 2.5},
                {"temperature": float("nan")},
                {"top_p": 0.0},
                {"top_k": -2},
                {"min_p": 1.5},
                {"presence_penalty": 2.5},
                {"frequency_penalty": -2.5},
                {"repetition_penalty": 0.0},
                {"logit_bias": {300: 1.0}},
                {"logit_bias": {3: 101.0}},
                {"bad_words": [" "]},
                {"bad_words": ["a"] * 129},
                {"min_tokens": 9, "max_tokens": 8},
                {"logprobs": 21},
                {"prompt_logprobs": 21},
                {"guide": pb.Guide()},
                {"guide": pb.Guide(regex="")},
                {"guide": pb.Guide(choices=pb.Choices())},
                {"guide": pb.Guide(choices=pb.Choices(choices=["a", ""]))},
            ]
        ),
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
