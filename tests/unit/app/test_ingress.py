import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from app.ingress import engine_of

REQUEST = GenerateRequest(
    request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=4)
)


class Response:
    """Serve's response generator: an async iterator with `cancel`."""

    def __init__(self, num_chunks: int, error: Exception | None) -> None:
        self._num_chunks = num_chunks
        self._error = error
        self.num_cancelled = 0

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        for index in range(self._num_chunks):
            yield TokenChunk(request_id="r", first_index=index, token_ids=(index,))
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self.num_cancelled += 1


class Handle:
    """As much of a deployment handle as a streaming call takes."""

    def __init__(self, response: Response) -> None:
        self.generate = self
        self._response = response
        self.options_given: dict[str, Any] = {}

    def options(self, **options: Any) -> "Handle":
        self.options_given = options
        return self

    def remote(self, request: GenerateRequest) -> Response:
        assert request is REQUEST
        return self._response


@pytest.mark.parametrize("error", [None, ValueError("broken")])
@pytest.mark.parametrize("num_read", [1, 3])
def test_the_router_call_is_cancelled_however_the_stream_ends(
    error: Exception | None, num_read: int
) -> None:
    response = Response(3, error)
    handle: Any = Handle(response)

    async def run() -> list[TokenChunk]:
        stream = engine_of(handle)(REQUEST)
        chunks = [await anext(stream) for _ in range(num_read)]
        if error is not None and num_read == 3:
            with pytest.raises(ValueError, match="broken"):
                await anext(stream)
        await stream.aclose()
        return chunks

    assert len(asyncio.run(run())) == num_read
    assert handle.options_given == {"stream": True}
    assert response.num_cancelled == 1
