"""OpenAI's API over HTTP, on top of the service. Request ids (`x-request-id`) are Serve's work."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from actors.errors import EngineDead, RequestRejected
from app import openai, responses
from app.choices import ChatChoice, CompletionChoice, Report
from app.errors import to_fault
from app.generation import Chat, Delta, Generation, GenerationInput, Prompt
from app.http_faults import FaultMiddleware, invalid_body, no_such_route, request_id_of
from app.service import Service
from app.sse import ChunkEvents, error_event

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 10.0


class HttpApi:
    """The endpoints. `check` returns where the engine is healthy, and raises where it is not."""

    def __init__(self, service: Service, check: Callable[[], Awaitable[None]]) -> None:
        self._service = service
        self._check = check
        self._started_at = int(time.time())

    def build(self) -> FastAPI:
        """The ASGI application. Whatever goes wrong, it answers in OpenAI's shape."""
        app = FastAPI(title="dflash-serve", redoc_url=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_exception_handler(RequestValidationError, invalid_body)
        app.add_exception_handler(HTTPException, no_such_route)
        app.add_middleware(FaultMiddleware)
        return app

    async def chat(self, body: openai.ChatRequest, request: Request) -> Response:
        prompt = Chat(tuple(message.for_template() for message in body.messages))
        generation = await self._start(body, (prompt,), "chatcmpl")
        choices = [
            ChatChoice(index, token_ids, _report(body), self._service.tokenizer.token_bytes)
            for index, token_ids in enumerate(generation.prompt_of_choices)
        ]
        return await self._answer(body, generation, choices, request)

    async def complete(self, body: openai.CompletionRequest, request: Request) -> Response:
        generation = await self._start(body, body.prompts, "cmpl")
        choices = [
            CompletionChoice(
                index,
                token_ids,
                _report(body, echo=self._echo(body, index // body.num_choices)),
                self._service.tokenizer.token_bytes,
            )
            for index, token_ids in enumerate(generation.prompt_of_choices)
        ]
        return await self._answer(body, generation, choices, request)

    async def models(self) -> responses.ModelList:
        card = responses.ModelCard(
            id=self._service.model_name,
            created=self._started_at,
            max_model_len=self._service.max_model_len,
        )
        return responses.ModelList(data=[card])

    async def health(self) -> dict[str, str]:
        """Raises `EngineDead` where the engine is not healthy, or does not say so in time."""
        try:
            await asyncio.wait_for(self._check(), _HEALTH_TIMEOUT_S)
        except Exception as error:  # whatever the reason, it can't serve
            logger.warning("the engine is not healthy: %r", error)
            raise EngineDead("the engine is not healthy") from error
        return {"status": "ok"}

    async def _start(
        self, body: openai.GenerationRequest, prompts: tuple[Prompt, ...], kind: str
    ) -> Generation:
        """The generation that `body` asks for, of the `kind` that its id begins with."""
        self._service.check_model(body.model)
        if body.wants_drafts and not self._service.speculative:
            raise RequestRejected("this model is served without a drafter", "speculative")
        max_tokens_param, max_tokens = body.limit
        return await self._service.start(
            GenerationInput(
                request_id=f"{kind}-{uuid.uuid4().hex}",
                prompts=prompts,
                sampling=body.sampling,
                num_choices=body.num_choices,
                max_tokens=max_tokens,
                max_tokens_param=max_tokens_param,
                default_max_tokens=body.default_max_tokens,
                seed=body.seed,
                bad_words=tuple(body.bad_words or ()),
                stop=body.stop_strings,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                max_draft_tokens=body.max_draft_tokens,
            )
        )

    def _echo(self, body: openai.CompletionRequest, index: int) -> str | None:
        """The text of a prompt, if it is asked for."""
        if not body.echo:
            return None
        prompt = body.prompts[index]
        if isinstance(prompt, str):
            return prompt
        return self._service.tokenizer.decode(prompt, special=True)

    async def _answer(
        self,
        body: openai.GenerationRequest,
        generation: Generation,
        choices: Sequence[ChatChoice | CompletionChoice],
        request: Request,
    ) -> Response:
        head = {
            "id": generation.request_id,
            "created": int(time.time()),
            "model": self._service.model_name,
        }
        if body.stream:
            events = ChunkEvents(head, choices, include_usage=body.include_usage)
            # Until the first token is there, an error can still have a status of its own.
            first = await anext(generation.deltas)
            stream = _events(first, generation, events, request_id_of(request))
            return _EventStream(stream, generation)
        deltas = await generation.result()
        wholes = [choice.whole(delta) for choice, delta in zip(choices, deltas, strict=True)]
        answer = {
            **head,
            "object": choices[0].whole_object,
            "choices": wholes,
            "usage": responses.usage_body(generation.usage(deltas)).model_dump(),
            **choices[0].about_prompt(deltas[0]),
        }
        return Response(json.dumps(answer), media_type="application/json")


class _EventStream(StreamingResponse):
    """Closes the generation when it ends, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], generation: Generation) -> None:
        super().__init__(events, headers={"cache-control": "no-cache"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.deltas.aclose()


async def _events(
    first: tuple[int, Delta], generation: Generation, events: ChunkEvents, request_id: str
) -> AsyncGenerator[str, None]:
    opening = events.opening()
    if opening:
        yield opening
    last: dict[int, Delta] = {}
    try:
        index, delta = first
        while True:
            text = events.push(index, delta)
            if text:
                yield text
            last[index] = delta
            try:
                index, delta = await anext(generation.deltas)
            except StopAsyncIteration:
                break
        yield events.closing(generation.usage([last[index] for index in sorted(last)]))
    except Exception as error:  # the status is out, so the stream has to say it
        yield error_event(to_fault(error, request_id))


def _report(body: openai.GenerationRequest, *, echo: str | None = None) -> Report:
    return Report(
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        echo=echo,
    )
