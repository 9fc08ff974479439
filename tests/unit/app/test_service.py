import asyncio
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest

from actors.config import EngineConfig
from actors.delivery import joined
from actors.errors import EngineDead, PromptTooLong, RequestRejected
from actors.messages import SamplingParams, SpeculationStats, TokenChunk
from app.generation import Chat, Delta, Generation, GenerationInput, Prompt
from app.service import Engine, ModelNotFound, Service
from app.tokenizer import Tokenizer
from tests.unit.app.fakes import (
    EOS,
    MAX_MODEL_LEN,
    STATS,
    Chorus,
    Recital,
    logprobs_of,
    replay,
)

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


@pytest.mark.parametrize("gathered", range(1, 8))
def test_a_stop_string_cuts_the_counters_of_steps_that_came_together(
    make: Any, tokenizer: Tokenizer, gathered: int
) -> None:
    """Chunks of so many steps, which emitted 1 to 5 tokens; a stop at every token."""
    tokens, widths = tokenizer.encode("abcdefghijklmnopqrs"), [1, 2, 1, 5, 1, 1, 4, 3, 1]
    steps, stats = [], SpeculationStats()
    for width in widths:
        first = steps[-1].first_index + len(steps[-1].token_ids) if steps else 0
        if first:  # the first token is the prefill's
            stats = SpeculationStats(
                verify_steps=stats.verify_steps + 1,
                draft_tokens=stats.draft_tokens + 4,
                accepted_tokens=stats.accepted_tokens + width - 1,
                emitted_tokens=stats.emitted_tokens + width,
            )
        run = tuple(tokens[first : first + width])
        steps.append(
            TokenChunk(request_id="r", first_index=first, token_ids=run, speculation=stats)
        )
    steps[-1] = replace(steps[-1], finish_reason="length")
    chunks = [reduce(joined, steps[i : i + gathered]) for i in range(0, len(steps), gathered)]
    for place, stop in enumerate("abcdefghijklmnopqrs"):
        result = generate(make(replay(chunks)), wanted(stop=(stop,)))
        assert result.token_ids == tuple(tokens[: place + 1])
        num_steps = sum(step.first_index <= place for step in steps) - 1
        assert result.finish.usage.speculation == SpeculationStats(
            verify_steps=num_steps,
            draft_tokens=4 * num_steps,
            accepted_tokens=place - num_steps,
            emitted_tokens=place,
        )


@pytest.mark.parametrize("width", [1, 2, 5])
def test_text_that_only_looked_like_a_stop_string_comes_out(
    make: Any, tokenizer: Tokenizer, width: int
) -> None:
    tokens = tokenizer.encode("see xy")
    engine = Recital(tokens, width=width, finish_reason="length")
    result = generate(make(engine), wanted(stop=("xyz",)))
    assert (result.text, result.finish.reason) == ("see xy", "length")
    assert result.finish.usage.speculation == STATS


@pytest.mark.parametrize("width", [1, 2, 3, 5, 16])
def test_characters_stay_whole_beside_a_stop_string(
    make: Any, tokenizer: Tokenizer, width: int
) -> None:
    """The stop strings begin as characters of the text do, in text and in bytes."""
    text = "日本 👍🏽 👩‍👩‍👧‍👦 e\u0301 ไทย 🇯🇵!"
    engine = Recital(tokenizer.encode(text), width=width, finish_reason="length")
    got = deltas(make(engine), wanted(stop=("👩‍👩‍👦", "👎", "日中", "🇯🇲", "e\u0302")))
    assert "".join(delta.text for delta in got) == text
    assert not any("\ufffd" in delta.text for delta in got)


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
        ({"sampling": {"temperature": 3.0}}, "temperature"),
        ({"sampling": {"logit_bias": ((300, 1.0),)}}, "logit_bias"),
        ({"sampling": {"min_tokens": 17}, "default_max_tokens": 16}, "min_tokens"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"max_draft_tokens": -1}, "max_draft_tokens"),
        ({"priority": 2**63}, "priority"),
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


@pytest.mark.parametrize("width", [1, 3, 16])
def test_logprobs_are_cut_where_the_ids_are(make: Any, tokenizer: Tokenizer, width: int) -> None:
    engine = Recital(tokenizer.encode(f"日 xyz and more{EOS}"), width=width)
    request = wanted(stop=("yz",), sampling={"logprobs": 2})
    got = deltas(make(engine), request)
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in got)
    whole = generate(make(engine), request)
    assert whole.text == "日 x"
    assert whole.token_ids == engine.tokens[: len(whole.token_ids)]
    assert whole.logprobs == tuple(logprobs_of(token, 2) for token in whole.token_ids)


def test_logprobs_of_a_replay_come_once(make: Any, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("wxyz")
    at = [logprobs_of(token, 0) for token in tokens]

    def chunk(first: int, last: int, **fields: Any) -> TokenChunk:
        return TokenChunk(
            request_id="r",
            first_index=first,
            token_ids=tuple(tokens[first:last]),
            logprobs=tuple(at[first:last]),
            **fields,
        )

    prompt = (5, 6)
    of_prompt = (None, at[0])
    chunks = [
        chunk(0, 0, prompt_logprobs=of_prompt, cached_tokens=1),
        chunk(0, 2),
        chunk(0, 3, prompt_logprobs=of_prompt, cached_tokens=0),
        chunk(2, 4, finish_reason="length"),
    ]
    request = wanted(prompt=prompt, sampling={"logprobs": 0, "prompt_logprobs": 0})
    got = deltas(make(replay(chunks)), request)
    assert [delta.prompt_logprobs for delta in got] == [of_prompt, (), ()]
    assert [entry for delta in got for entry in delta.logprobs] == at
    assert got[-1].finish.usage.cached_tokens == 1


@pytest.mark.parametrize("asked", ["logprobs", "prompt_logprobs"])
def test_an_engine_that_forgets_logprobs_is_caught(make: Any, asked: str) -> None:
    chunk = TokenChunk(request_id="r", first_index=0, token_ids=(70,), finish_reason="length")
    with pytest.raises(AssertionError, match="left out"):
        generate(make(replay([chunk])), wanted(sampling={asked: 0}))


@pytest.mark.parametrize("width", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [
        (0, "x"),
        (2, "x"),
        (3, "xabx"),
        (5, "xabx"),
        (6, "xabxabx"),
        (8, "xabxabx"),
        (9, "xabxabxab"),
    ],
)
def test_min_tokens_holds_stop_strings_back(
    make: Any, tokenizer: Tokenizer, width: int, min_tokens: int, text: str
) -> None:
    tokens = tokenizer.encode("xabxabxab")
    assert len(tokens) == 9
    engine = Recital(tokens, width=width, finish_reason="length")
    whole = generate(make(engine), wanted(stop=("ab",), sampling={"min_tokens": min_tokens}))
    assert whole.text == text


def test_bad_words_are_tokenised_as_they_may_stand(make: Any, tokenizer: Tokenizer) -> None:
    engine = Recital([70, 1])
    generate(make(engine), wanted(bad_words=("the", "ü")))
    forms = [*tokenizer.encode_banned("the"), *tokenizer.encode_banned("ü")]
    assert engine.requests[0].sampling.bad_words == tuple(map(tuple, forms))
    assert len(forms) == 3


def test_a_seed_is_kept_and_none_is_random(make: Any) -> None:
    engine = Recital([70, 1])
    generate(make(engine), wanted(seed=-3))
    for _ in range(20):
        generate(make(engine), wanted())
    first, *drawn = [request.sampling.seed for request in engine.requests]
    assert first == -3
    assert len(set(drawn)) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_scheduling_goes_to_the_engine(make: Any) -> None:
    engine = Recital([70, 1])
    generate(make(engine), wanted(priority=-4, cache_salt="mine", max_draft_tokens=2))
    generate(make(engine), wanted())
    found = [(r.priority, r.cache_salt, r.max_draft_tokens) for r in engine.requests]
    assert found == [(-4, "mine", 2), (0, "", None)]


def start_many(service: Service, **changes: Any) -> tuple[Generation, tuple[Delta, ...]]:
    request = wanted(num_choices=2, prompts=((10, 11), (12,)), **changes)

    async def run() -> tuple[Generation, tuple[Delta, ...]]:
        generation = await service.start(request)
        return generation, await generation.result()

    return asyncio.run(run())


def test_choices_are_numbered_through_the_prompts(make: Any, tokenizer: Tokenizer) -> None:
    texts = ["a", "the cat", "", "hello world"]
    cached = [1, 2, 1, 0]
    recitals = [
        Recital(tokenizer.encode(text + EOS), cached_tokens=n)
        for text, n in zip(texts, cached, strict=True)
    ]
    engine = Chorus(*recitals)
    generation, wholes = start_many(make(engine), seed=7)
    assert [whole.text for whole in wholes] == texts
    assert [r.request_id for r in engine.requests] == ["r-0", "r-1", "r-2", "r-3"]
    assert [r.prompt_token_ids for r in engine.requests] == [(10, 11), (10, 11), (12,), (12,)]
    assert [(r.sampling.seed, r.sampling.choice) for r in engine.requests] == [(7, 0), (7, 1)] * 2
    usage = generation.usage(wholes)
    assert usage.prompt_tokens == 3
    assert usage.completion_tokens == sum(len(recital.tokens) for recital in recitals)
    assert usage.cached_tokens == 1
    assert usage.speculation.verify_steps == 4 * STATS.verify_steps
    assert usage.speculation.emitted_tokens == 4 * STATS.emitted_tokens


def test_prompts_without_a_seed_are_independent(make: Any) -> None:
    engine = Recital([70, 1])
    start_many(make(engine))
    one, also_one, other, also_other = [r.sampling.seed for r in engine.requests]
    assert (one, other) == (also_one, also_other)
    assert one != other


def test_a_choice_that_fails_ends_all(make: Any, tokenizer: Tokenizer) -> None:
    endless = [Recital(tokenizer.encode("the cat sat ") * 99, width=1) for _ in range(3)]
    engine = Chorus(*endless, Recital([70], error=EngineDead("gone")))
    with pytest.raises(EngineDead):
        start_many(make(engine))
    assert engine.num_closed == 4


def test_a_bad_prompt_among_good_ones_starts_nothing(make: Any) -> None:
    engine = Recital([70, 1])
    with pytest.raises(RequestRejected):
        asyncio.run(make(engine).start(wanted(prompts=((10,), (300,)))))
    assert engine.requests == []
