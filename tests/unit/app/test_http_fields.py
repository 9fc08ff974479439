"""What a request's fields change: in the request that the engine gets, and in the answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from actors.config import EngineConfig
from actors.errors import EngineDead
from actors.messages import Guide
from app.http_api import HttpApi
from app.service import Engine, Service
from app.tokenizer import Tokenizer
from tests.unit.app.fakes import EOS, STATS, Chorus, Recital, logprobs_of

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
TEXTS = ["the 日本 cat", "sat on", "👍🏽!"]

MakeApp = Callable[..., FastAPI]


async def healthy() -> None:
    return


@pytest.fixture
def make_app(config: EngineConfig, tokenizer: Tokenizer) -> MakeApp:
    def make(engine: Engine, config: EngineConfig = config) -> FastAPI:
        return HttpApi(Service(config, tokenizer, engine), healthy).build()

    return make


@pytest.fixture
def chorus(tokenizer: Tokenizer) -> Chorus:
    """Three choices of different lengths and widths."""
    return Chorus(
        *(Recital(tokenizer.encode(text + EOS), width=2 + i) for i, text in enumerate(TEXTS))
    )


def post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def answer(app: FastAPI, path: str, body: dict[str, Any]) -> Any:
    response = post(app, path, body)
    assert response.status_code == 200, response.text
    return response.json()


def events(app: FastAPI, path: str, body: dict[str, Any]) -> list[Any]:
    """Those before `[DONE]`, which has to be the last."""
    response = post(app, path, body | {"stream": True})
    assert response.status_code == 200, response.text
    *found, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in found]


def put_together(chunks: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream in the form of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "logprobs": None})
            assert "finish_reason" not in choice, "a chunk behind the end of its choice"
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
            if "delta" in part:
                message = choice.setdefault("message", {"refusal": None, "content": ""})
                message["role"] = part["delta"].get("role") or message["role"]
                message["content"] += part["delta"].get("content", "")
            else:
                choice["text"] = choice.get("text", "") + part["text"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                found = choice["logprobs"].setdefault(name, values and [])
                if values:
                    found.extend(values)
            if "token_ids" in part:
                choice.setdefault("token_ids", []).extend(part["token_ids"])
            if "prompt_token_ids" in part:
                assert "prompt_token_ids" not in choice
                choice["prompt_token_ids"] = part["prompt_token_ids"]
    return [choices[index] for index in sorted(choices)]


# ------------------------------------------------------------------ what the engine is asked for

CHOICE = Guide(kind="regex", source="yes|no")


@BOTH
@pytest.mark.parametrize(
    ("sent", "name", "value"),
    [
        ({}, "temperature", 1.0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"min_p": 0.5}, "min_p", 0.5),
        ({"seed": 11}, "seed", 11),
        ({"presence_penalty": 1}, "presence_penalty", 1.0),
        ({"frequency_penalty": -1}, "frequency_penalty", -1.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"logit_bias": {"9": -3}}, "logit_bias", ((9, -3.0),)),
        ({"min_tokens": 1}, "min_tokens", 1),
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"stop_token_ids": [9]}, "stop_token_ids", (9,)),
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
        ({"guided_choice": ["yes", "no"]}, "guide", CHOICE),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "guide", CHOICE),
        ({"response_format": {"type": "json_object"}}, "guide", Guide(kind="json_object")),
    ],
)
def test_sampling_fields_reach_the_engine(
    make_app: MakeApp, path: str, body: dict[str, Any], sent: dict[str, Any], name: str, value: Any
) -> None:
    engine = Recital([70, 1])
    answer(make_app(engine), path, body | sent)
    assert getattr(engine.requests[0].sampling, name) == value


@BOTH
def test_bad_words_reach_the_engine(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    engine = Recital([70, 1])
    answer(make_app(engine), path, body | {"bad_words": ["the"]})
    forms = tokenizer.encode_banned("the")
    assert engine.requests[0].sampling.bad_words == tuple(map(tuple, forms))


@BOTH
@pytest.mark.parametrize("stop", ["sat", ["never", "sat"]])
def test_a_stop_string_ends_the_text(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any], stop: Any
) -> None:
    app = make_app(Recital(tokenizer.encode("the cat sat on" + EOS)))
    (choice,) = answer(app, path, body | {"stop": stop})["choices"]
    text = choice["message"]["content"] if body is CHAT else choice["text"]
    assert (text, choice["finish_reason"]) == ("the cat ", "stop")


@BOTH
@pytest.mark.parametrize(
    ("sent", "name", "value"),
    [
        ({}, "max_draft_tokens", None),
        ({"speculative": {"enabled": True}}, "max_draft_tokens", None),
        ({"speculative": {"enabled": False}}, "max_draft_tokens", 0),
        ({"speculative": {"max_draft_tokens": 2}}, "max_draft_tokens", 2),
        ({"priority": -1}, "priority", -1),
        ({"cache_salt": "mine"}, "cache_salt", "mine"),
    ],
)
def test_scheduling_fields_reach_the_engine(
    make_app: MakeApp, path: str, body: dict[str, Any], sent: dict[str, Any], name: str, value: Any
) -> None:
    engine = Recital([70, 1])
    answer(make_app(engine), path, body | sent)
    assert getattr(engine.requests[0], name) == value


@BOTH
@pytest.mark.parametrize("wanted", [{"enabled": True}, {"max_draft_tokens": 1}])
def test_drafts_are_refused_without_a_drafter(
    make_app: MakeApp,
    plain_config: EngineConfig,
    path: str,
    body: dict[str, Any],
    wanted: dict[str, Any],
) -> None:
    app = make_app(Recital([70, 1]), plain_config)
    response = post(app, path, body | {"speculative": wanted})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "speculative")
    assert answer(app, path, body | {"speculative": {"enabled": False}})["choices"]


@BOTH
@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
def test_what_only_the_model_rules_out_is_refused_too(
    make_app: MakeApp, path: str, body: dict[str, Any], sent: dict[str, Any], param: str
) -> None:
    engine = Recital([70, 1])
    response = post(make_app(engine), path, body | sent)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.requests == []


# ------------------------------------------------------------------------------ several choices

EVERYTHING_OF: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    "/v1/completions": {"logprobs": 2, "return_token_ids": True, "echo": True},
}


@BOTH
@pytest.mark.parametrize("detailed", [False, True])
@pytest.mark.parametrize("stop", [[], ["at", "日本"]])
def test_a_stream_of_choices_equals_the_whole(
    make_app: MakeApp,
    chorus: Chorus,
    path: str,
    body: dict[str, Any],
    detailed: bool,
    stop: list[str],
) -> None:
    body = body | {"n": 3, "seed": 5, "stop": stop} | (EVERYTHING_OF[path] if detailed else {})
    app = make_app(chorus)
    whole = answer(app, path, body)
    *chunks, last = events(app, path, body | {"stream_options": {"include_usage": True}})
    streamed = put_together(chunks)
    if "prompt_token_ids" in whole:
        told = [chunk.get("prompt_token_ids") for chunk in chunks]
        assert told == [whole["prompt_token_ids"]] * 3 + [None] * (len(chunks) - 3)
    assert streamed == whole["choices"]
    assert [choice["index"] for choice in streamed] == [0, 1, 2]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chorus.num_closed == 6
    assert [r.sampling.choice for r in chorus.requests] == [0, 0, 1, 1, 2, 2]
    assert {r.sampling.seed for r in chorus.requests} == {5}


@BOTH
def test_streamed_choices_take_turns(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    tokens = tokenizer.encode("the cat sat on the mat" + EOS)
    app = make_app(Chorus(*(Recital(tokens, width=1) for _ in range(3))))
    chunks = events(app, path, body | {"n": 3})
    turns = [part["index"] for chunk in chunks for part in chunk["choices"]]
    assert {0, 1, 2} == set(turns[3:9])


@BOTH
def test_usage_is_that_of_all_choices(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    recitals = [Recital(tokenizer.encode(t + EOS), cached_tokens=3 + i) for i, t in enumerate("ab")]
    usage = answer(make_app(Chorus(*recitals)), path, body | {"n": 2})["usage"]
    num_prompt = len(recitals[0].requests[0].prompt_token_ids)
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "total_tokens": num_prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 3},
        "speculative": {
            "verify_steps": 2 * STATS.verify_steps,
            "draft_tokens": 2 * STATS.draft_tokens,
            "accepted_tokens": 2 * STATS.accepted_tokens,
            "mean_acceptance_length": STATS.mean_acceptance_length,
        },
    }


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_fails_the_answer(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any], stream: bool
) -> None:
    long = Recital(tokenizer.encode("the cat sat") * 50, width=1)
    engine = Chorus(long, Recital(tokenizer.encode("the"), error=EngineDead("gone")))
    response = post(make_app(engine), path, body | {"n": 2, "stream": stream})
    assert "engine_unavailable" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 503)
    assert engine.num_closed == 2


@BOTH
def test_a_client_that_leaves_ends_every_choice(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    engine = Chorus(*(Recital(tokenizer.encode("the cat ") * 99, width=1) for _ in range(3)))
    app = make_app(engine)
    request = json.dumps(body | {"stream": True, "n": 3}).encode()

    async def run() -> None:
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": request}]
        num_sent = 0

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent == 9:
                gone.set()
                await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await asyncio.wait_for(app(scope, receive, send), 5)

    asyncio.run(run())
    assert engine.num_closed == 3


def test_several_prompts_of_several_choices(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    recitals = [Recital(tokenizer.encode(text + EOS)) for text in "abcd"]
    engine = Chorus(*recitals)
    prompts = ["hello", "the cat"]
    body = {"model": "tiny", "prompt": prompts, "n": 2, "echo": True, "return_token_ids": True}
    whole = answer(make_app(engine), "/v1/completions", body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["helloa", "hellob", "the catc", "the catd"]
    ids = [tokenizer.encode(prompt) for prompt in prompts for _ in range(2)]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == ids
    assert [list(r.prompt_token_ids) for r in engine.requests] == ids
    assert whole["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[2])
    assert whole["usage"]["completion_tokens"] == 8
    streamed = put_together(events(make_app(engine), "/v1/completions", body))
    assert streamed == whole["choices"]


# -------------------------------------------------------------------------------- what is told


def test_logprobs_of_a_chat(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("日!" + EOS)
    body = CHAT | {"logprobs": True, "top_logprobs": 1}
    (choice,) = answer(make_app(Recital(tokens)), "/v1/chat/completions", body)["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-token / 8 for token in tokens]
    assert [entry["bytes"] for entry in content] == [[230], [151], [165], [33], list(EOS.encode())]
    assert [entry["token"] for entry in content] == [r"\xe6", r"\x97", r"\xa5", "!", EOS]
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * 5
    (plain,) = answer(make_app(Recital(tokens)), "/v1/chat/completions", CHAT)["choices"]
    assert plain["logprobs"] is None


def test_logprobs_of_a_completion(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" 日!" + EOS)
    body = COMPLETION | {"logprobs": 0}
    (choice,) = answer(make_app(Recital(tokens)), "/v1/completions", body)["choices"]
    assert choice["logprobs"] == {
        "tokens": [" ", r"\xe6", r"\x97", r"\xa5", "!", EOS],
        "token_logprobs": [-token / 8 for token in tokens],
        "top_logprobs": [{tokenizer.token_bytes.text(t): -t / 8} for t in tokens],
        "text_offset": [0, 1, 1, 1, 2, 3],
    }


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo(make_app: MakeApp, tokenizer: Tokenizer, as_ids: bool) -> None:
    text = "<|im_start|>the 日"
    prompt = tokenizer.encode(text)
    engine = Recital(tokenizer.encode("!" + EOS))
    sent = {"prompt": prompt if as_ids else text, "echo": True}
    (plain,) = answer(make_app(engine), "/v1/completions", COMPLETION | sent)["choices"]
    assert (plain["text"], plain["logprobs"]) == (f"{text}!", None)
    body = COMPLETION | sent | {"logprobs": 1, "prompt_logprobs": 0}
    (choice,) = answer(make_app(engine), "/v1/completions", body)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == f"{text}!"
    assert logprobs["tokens"][-2:] == ["!", EOS]
    assert logprobs["token_logprobs"] == [
        None,
        *(-token / 8 for token in [*prompt[1:], *engine.tokens]),
    ]
    assert logprobs["text_offset"][-2:] == [len(text), len(text) + 1]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * (len(prompt) - 1)


@BOTH
def test_prompt_logprobs(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    engine = Recital([70, 1])
    whole = answer(make_app(engine), path, body | {"prompt_logprobs": 1})
    told = whole if body is CHAT else whole["choices"][0]
    prompt = engine.requests[0].prompt_token_ids
    first, *others = told["prompt_logprobs"]
    assert first is None
    for token, entry in zip(prompt[1:], others, strict=True):
        assert entry[str(token)] == {
            "logprob": logprobs_of(token, 1).logprob,
            "rank": 5,
            "decoded_token": tokenizer.token_bytes.text(token),
        }
        assert "60" in entry
    assert "prompt_logprobs" not in json.dumps(answer(make_app(engine), path, body))


@BOTH
def test_token_ids(
    make_app: MakeApp, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    engine = Recital(tokenizer.encode("the cat" + EOS))
    whole = answer(make_app(engine), path, body | {"return_token_ids": True})
    (choice,) = whole["choices"]
    told = whole if body is CHAT else choice
    assert told["prompt_token_ids"] == list(engine.requests[0].prompt_token_ids)
    assert choice["token_ids"] == list(engine.tokens)
    assert "token_ids" not in json.dumps(answer(make_app(engine), path, body))


# ---------------------------------------------------------------------------- OpenAI's own client


def with_client(app: FastAPI, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://test/v1", http_client=http, max_retries=0
        )
        async with client:
            return await use(client)

    return asyncio.run(run())


def test_openais_client_reads_a_chat(make_app: MakeApp, chorus: Chorus) -> None:
    fields: dict[str, Any] = {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 2, "seed": 1}

    async def whole(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(**fields)

    async def streamed(client: openai.AsyncOpenAI) -> list[Any]:
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(**fields, stream=True, stream_options=options)
        return [chunk async for chunk in stream]

    completion = with_client(make_app(chorus), whole)
    # Strict: the client itself takes what does not fit.
    type(completion).model_validate(completion.model_dump(), strict=True)
    assert [choice.message.content for choice in completion.choices] == TEXTS
    assert completion.choices[0].logprobs.content[0].top_logprobs[1].logprob == -0.25
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    *chunks, last = with_client(make_app(chorus), streamed)
    for chunk in [*chunks, last]:
        type(chunk).model_validate(chunk.model_dump(), strict=True)
    assert last.usage == completion.usage
    for index, text in enumerate(TEXTS):
        parts = [c.delta.content for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(part or "" for part in parts) == text


def test_openais_client_reads_a_completion(make_app: MakeApp, chorus: Chorus) -> None:
    fields: dict[str, Any] = {**COMPLETION, "n": 3, "best_of": 3, "logprobs": 2, "echo": True}

    async def whole(client: openai.AsyncOpenAI) -> Any:
        return await client.completions.create(**fields)

    async def streamed(client: openai.AsyncOpenAI) -> list[Any]:
        return [chunk async for chunk in await client.completions.create(**fields, stream=True)]

    completion = with_client(make_app(chorus), whole)
    assert [choice.text for choice in completion.choices] == [f"hello{text}" for text in TEXTS]
    offsets = completion.choices[1].logprobs.text_offset
    assert offsets[-1] == len("hellosat on")
    chunks = with_client(make_app(chorus), streamed)
    parts = [c.text for chunk in chunks for c in chunk.choices if c.index == 1]
    assert "".join(parts) == "hellosat on"


def test_openais_client_asks_for_a_schema(make_app: MakeApp, tokenizer: Tokenizer) -> None:
    engine = Recital(tokenizer.encode("{}" + EOS))
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "nothing", "schema": schema, "strict": True},
    }

    async def ask(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(**CHAT, response_format=response_format)

    assert with_client(make_app(engine), ask).choices[0].message.content == "{}"
    guide = engine.requests[0].sampling.guide
    assert guide is not None
    assert (guide.kind, json.loads(guide.source)) == ("json_schema", schema)
