import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from actors.config import EngineConfig
from actors.errors import EngineDead, PromptTooLong, RequestRejected
from actors.messages import SamplingParams, TokenChunk
from app.generation import Chat, Delta, GenerationInput, Prompt
from app.service import Engine, ModelNotFound, Service
from app.tokenizer import Tokenizer
from tests.unit.app.fakes import EOS, MAX_MODEL_LEN, STATS, Recital, replay

HELLO = Chat(({"role": "user", "content": "hello"},))


def wanted(
    *, prompt: Prompt = HELLO, sampling: dict[str, Any] | None = None, **changes: Any
) -> GenerationInput:
    chosen = partial(SamplingParams, **(sampling or {}))
    return replace(GenerationInput(request_id="r", prompts=(prompt,), sampling=chosen), **changes)


def generate(service: Service, request: GenerationInput) -> Delta:
    async def run() -> Delta:
        (whole,) = await (await service.start(request)).result()
        return whole

    return asyncio.run(run())


def deltas(service: Service, request: GenerationInput) -> list[Delta]:
    async def run() -> list[Delta]:
        return [delta async for _, delta in (await service.start(request)).deltas]

    return asyncio.run(run())


@pytest.fixture
def make(config: EngineConfig, tokenizer: Tokenizer) -> Any:
    def service(engine: Engine) -> Service:
        return Service(config, tokenizer, engine)

    return service


def test_the_ending_token_is_counted_but_not_read(make: Any, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"héllo 日本{EOS}")
    result = generate(make(Recital(tokens)), wanted())
    assert result.text == "héllo 日本"
    assert result.token_ids == tuple(tokens)
    assert result.finish.reason == "stop"
    assert result.finish.usage.completion_tokens == len(tokens)
    assert result.finish.usage.prompt_tokens == len(tokenizer.encode_chat(HELLO.messages))
    assert result.finish.usage.speculation == STATS


def test_a_stop_id_with_a_text_of_its_own_is_not_read(make: Any, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("hello") + tokenizer.encode("!")
    engine = Recital(tokens)
    result = generate(make(engine), wanted(sampling={"stop_token_ids": (tokens[-1],)}))
    assert result.text == "hello"
    assert engine.requests[0].sampling.stop_token_ids == (tokens[-1],)


def test_no_speculation_without_a_drafter(plain_config: EngineConfig, tokenizer: Tokenizer) -> None:
    service = Service(plain_config, tokenizer, Recital(tokenizer.encode(f"a{EOS}")))
    assert generate(service, wanted()).finish.usage.speculation is None


@pytest.mark.parametrize("width", range(1, 17))
@pytest.mark.parametrize("offset", range(5))
def test_a_stop_string_cuts_text_ids_and_usage_where_it_is_completed(
    make: Any, tokenizer: Tokenizer, width: int, offset: int
) -> None:
    head = tokenizer.encode("日" * offset + "see x")
    stop = tokenizer.encode("yz!")
    engine = Recital(head + stop + tokenizer.encode(f" and more{EOS}"), width=width)
    result = generate(make(engine), wanted(stop=("xyz", "never")))
    assert result.text == "日" * offset + "see "
    assert result.token_ids == tuple(head + stop[:2])
    assert result.finish.reason == "stop"
    assert result.finish.usage.completion_tokens == len(head) + 2
    # What the chunk held behind the stop is taken out of the counters too.
    chunk_end = -(-(len(head) + 2) // width) * width
    dropped = min(chunk_end, len(engine.tokens)) - (len(head) + 2)
    assert result.finish.usage.speculation == STATS.without(dropped)
    assert engine.num_closed == 1


@pytest.mark.parametrize("width", [1, 2, 5])
def test_text_that_only_looked_like_a_stop_string_comes_out(
    make: Any, tokenizer: Tokenizer, width: int
) -> None:
    tokens = tokenizer.encode("see xy")
    engine = Recital(tokens, width=width, finish_reason="length")
    result = generate(make(engine), wanted(stop=("xyz",)))
    assert (result.text, result.finish.reason) == ("see xy", "length")
    assert result.finish.usage.speculation == STATS


def test_a_stop_string_on_the_very_last_token_keeps_the_counters(
    make: Any, tokenizer: Tokenizer
) -> None:
    engine = Recital(tokenizer.encode("see xyz"), finish_reason="length")
    result = generate(make(engine), wanted(stop=("xyz",)))
    assert (result.text, result.finish.reason) == ("see ", "stop")
    assert result.finish.usage.speculation == STATS


def test_a_stop_string_that_only_the_end_shows_drops_no_token(
    make: Any, tokenizer: Tokenizer
) -> None:
    half = tokenizer.encode("日")[:1]
    tokens = [*tokenizer.encode("see "), *half, *tokenizer.encode(EOS)]
    result = generate(make(Recital(tokens, width=1)), wanted(stop=("\ufffd",)))
    assert (result.text, result.finish.reason) == ("see ", "stop")
    assert result.token_ids == tuple(tokens)
    assert result.finish.usage.speculation == STATS


def test_a_replay_is_delivered_once(make: Any, tokenizer: Tokenizer) -> None:
    a, b, c, d = tokenizer.encode("wxyz")
    chunks = [
        TokenChunk(request_id="r", first_index=0, token_ids=(a, b)),
        TokenChunk(request_id="r", first_index=0, token_ids=(a,)),
        TokenChunk(request_id="r", first_index=1, token_ids=(b, c)),
        TokenChunk(request_id="r", first_index=3, token_ids=()),
        TokenChunk(request_id="r", first_index=2, token_ids=(c, d), finish_reason="length"),
    ]
    got = deltas(make(replay(chunks)), wanted())
    assert [delta.token_ids for delta in got] == [(a, b), (c,), (d,)]
    assert "".join(delta.text for delta in got) == "wxyz"


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [TokenChunk(request_id="r", first_index=0, token_ids=(70,))],
        [TokenChunk(request_id="r", first_index=0, token_ids=(70,), finish_reason="abort")],
    ],
)
def test_an_output_without_an_end_is_an_error(make: Any, chunks: list[TokenChunk]) -> None:
    with pytest.raises(EngineDead):
        generate(make(replay(chunks)), wanted())


def test_a_client_that_leaves_closes_the_engine_stream(make: Any, tokenizer: Tokenizer) -> None:
    engine = Recital(tokenizer.encode("the cat sat"), width=1)

    async def leave() -> None:
        generation = await make(engine).start(wanted())
        await anext(generation.deltas)
        await generation.deltas.aclose()

    asyncio.run(leave())
    assert engine.num_closed == 1


def test_a_request_that_is_never_read_never_starts(make: Any) -> None:
    engine = Recital([70])

    async def ignore() -> None:
        generation = await make(engine).start(wanted())
        await generation.deltas.aclose()

    asyncio.run(ignore())
    assert engine.requests == []


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(range(10, 10 + length))


@pytest.mark.parametrize(("length", "room"), [(1, MAX_MODEL_LEN - 1), (MAX_MODEL_LEN - 1, 1)])
def test_without_max_tokens_the_output_may_fill_the_context(
    make: Any, length: int, room: int
) -> None:
    engine = Recital([70, 1])
    generate(make(engine), wanted(prompt=prompt_of(length)))
    generate(make(engine), wanted(prompt=prompt_of(length), default_max_tokens=16))
    generate(make(engine), wanted(prompt=prompt_of(length), max_tokens=room))
    limits = [request.sampling.max_tokens for request in engine.requests]
    assert limits == [room, min(16, room), room]
    assert engine.requests[0].prompt_token_ids == prompt_of(length)


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
def test_a_prompt_must_leave_room_for_one_token(make: Any, length: int) -> None:
    with pytest.raises(PromptTooLong, match=f"has {length} tokens, the limit is 63") as caught:
        generate(make(Recital([])), wanted(prompt=prompt_of(length)))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": (300,)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"prompt": (10, 11), "max_tokens": 63}, "max_tokens"),
        ({"prompt": (10,), "max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 64, "max_tokens_param": "max_completion_tokens"}, "max_completion_tokens"),
        ({"sampling": {"stop_token_ids": (5, 300)}}, "stop_token_ids"),
        ({"prompt": Chat(({"role": "tool", "content": "x"},))}, "messages"),
        ({"prompt": Chat(({"role": "user", "content": "日" * 30},))}, "messages"),
    ],
)
def test_requests_that_cannot_be_served(make: Any, changes: dict[str, Any], param: str) -> None:
    engine = Recital([70, 1])
    with pytest.raises(RequestRejected) as caught:
        generate(make(engine), wanted(**changes))
    assert caught.value.param == param
    assert engine.requests == []


def test_other_models_are_not_here(make: Any) -> None:
    make(Recital([])).check_model("tiny")
    with pytest.raises(ModelNotFound, match="'gpt-4' does not exist"):
        make(Recital([])).check_model("gpt-4")
