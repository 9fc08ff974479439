"""Loads over HTTP: streamed chat completions of a running server, ours or any with OpenAI's API."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import httpx

from benchmarks.load import LoadFailed, Mode, Sample, Source

# A queue may hold a request for long, an address answers at once or not at all.
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class HttpLoad:
    """One server in one mode. Templates and tokenising are part of what is timed.

    A request's first token came with the first event that has text, or the finish where there is
    no text; its last came with the last such event.
    """

    source: Source = "http"

    def __init__(
        self, mode: Mode, url: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Asks the server at `url` which model it serves. Raises `LoadFailed`.

        `transport` replaces the network.
        """
        self.mode: Mode = mode
        self._url = url
        self._transport = transport
        self._model = asyncio.run(self._served_model())

    def run(
        self,
        texts: Sequence[str],
        max_tokens: int,
        concurrency: int,
        on_finish: Callable[[], None],
    ) -> tuple[Sample, ...]:
        """See `Load.run`."""
        return asyncio.run(self._run(texts, max_tokens, concurrency, on_finish))

    async def _run(
        self,
        texts: Sequence[str],
        max_tokens: int,
        concurrency: int,
        on_finish: Callable[[], None],
    ) -> tuple[Sample, ...]:
        bodies = iter([self._body(text, max_tokens) for text in texts])
        samples: list[Sample] = []

        async def keep_busy(bodies: Iterator[dict[str, Any]]) -> None:
            for body in bodies:
                samples.append(await self._answer(client, body))
                on_finish()

        async with self._client() as client:
            await asyncio.gather(*(keep_busy(bodies) for _ in range(concurrency)))
        return tuple(samples)

    def _body(self, text: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Prompts repeat from round to round, and should not be cached.
            "cache_salt": uuid4().hex,
        }

    async def _answer(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Sample:
        submitted_at = time.perf_counter()
        arrivals: list[float] = []
        usage: dict[str, Any] | None = None
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                await self._check(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise self._failed(f"the stream ended with {event['error']}")
                    usage = event.get("usage") or usage
                    if any(map(_has_token, event["choices"])):
                        arrivals.append(time.perf_counter())
        except httpx.HTTPError as error:
            raise self._failed(repr(error)) from None
        except (ValueError, LookupError, TypeError):
            raise self._failed("an event of the stream is not in OpenAI's shape") from None
        if not arrivals or usage is None:
            raise self._failed("the stream ended without a token or without usage")
        speculative = usage.get("speculative") or {"verify_steps": 0, "accepted_tokens": 0}
        return Sample(
            submitted_at=submitted_at,
            first_token_at=arrivals[0],
            finished_at=arrivals[-1],
            num_tokens=usage["completion_tokens"],
            verify_steps=speculative["verify_steps"],
            emitted_tokens=speculative["verify_steps"] + speculative["accepted_tokens"],
        )

    async def _served_model(self) -> str:
        try:
            async with self._client() as client:
                response = await client.get("/v1/models")
                await self._check(response)
                model: str = response.json()["data"][0]["id"]
                return model
        except httpx.HTTPError as error:
            raise self._failed(repr(error)) from None
        except (ValueError, LookupError, TypeError):
            raise self._failed("/v1/models is not in OpenAI's shape") from None

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._url, timeout=_TIMEOUT, limits=_UNLIMITED, transport=self._transport
        )

    async def _check(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            body = " ".join((await response.aread()).decode(errors="replace").split())
            raise self._failed(f"status {response.status_code}: {body:.300}")

    def _failed(self, what: str) -> LoadFailed:
        return LoadFailed(f"{self._url}: {what}")


def _has_token(choice: dict[str, Any]) -> bool:
    return bool(choice["delta"].get("content") or choice["finish_reason"])
