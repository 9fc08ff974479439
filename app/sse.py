"""Server-sent events of a streamed answer, in OpenAI's shape."""

import json
from typing import Any

from app.errors import Fault
from app.generation import Usage
from app.responses import error_body, usage_body

DONE = "data: [DONE]\n\n"


def event(payload: Any) -> str:
    """One event. ASCII only: some clients take U+2028 or U+0085 for the end of a line."""
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"


def error_event(fault: Fault) -> str:
    """Ends a stream that failed after it began; no `[DONE]` follows."""
    return event(error_body(fault).model_dump())


class ChunkEvents:
    """The chunks of one streamed answer, of a chat or of a completion."""

    def __init__(
        self, *, id: str, created: int, model: str, chat: bool, include_usage: bool
    ) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self._head = {
            "id": id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
        }

    def opening(self) -> str:
        """Who speaks: a chat's first chunk, and nothing for a completion."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self._chat else ""

    def text(self, text: str) -> str:
        return self._chunk({"content": text} if self._chat else text, None)

    def closing(self, finish_reason: str, usage: Usage) -> str:
        """The finish reason, then usage where it was asked for, then `[DONE]`."""
        events = self._chunk({} if self._chat else "", finish_reason)
        if self._include_usage:
            body = usage_body(usage).model_dump()
            events += event(self._head | {"choices": [], "usage": body})
        return events + DONE

    def _chunk(self, content: Any, finish_reason: str | None) -> str:
        choice = {
            "index": 0,
            "delta" if self._chat else "text": content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return event(self._head | {"choices": [choice]} | usage)
