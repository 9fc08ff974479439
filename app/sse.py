"""Server-sent events of a streamed answer, in OpenAI's shape."""

import json
from collections.abc import Sequence
from typing import Any

from app.choices import ChatChoice, CompletionChoice
from app.errors import Fault
from app.generation import Delta, Usage
from app.responses import error_body, usage_body

DONE = "data: [DONE]\n\n"


def event(payload: Any) -> str:
    """One event. ASCII only: some clients take U+2028 or U+0085 for the end of a line."""
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"


def error_event(fault: Fault) -> str:
    """Ends a stream that failed after it began; no `[DONE]` follows."""
    return event(error_body(fault).model_dump())


class ChunkEvents:
    """The chunks of one streamed answer. `head` is what all of them have in common."""

    def __init__(
        self,
        head: dict[str, Any],
        choices: Sequence[ChatChoice | CompletionChoice],
        *,
        include_usage: bool,
    ) -> None:
        self._choices = choices
        self._include_usage = include_usage
        self._head = {**head, "object": choices[0].chunk_object}

    def opening(self) -> str:
        """What comes before any token."""
        return "".join(
            self._chunk(opening, **choice.about_prompt())
            for choice in self._choices
            if (opening := choice.opening()) is not None
        )

    def push(self, index: int, delta: Delta) -> str:
        """What `delta` adds to choice `index`, then the end of the choice if it is its last."""
        choice = self._choices[index]
        chunk = choice.chunk(delta)
        events = "" if chunk is None else self._chunk(chunk)
        return events + (self._chunk(choice.closing(delta.finish)) if delta.finish else "")

    def closing(self, usage: Usage) -> str:
        """Usage where it was asked for, then `[DONE]`."""
        if not self._include_usage:
            return DONE
        body = usage_body(usage).model_dump()
        return event({**self._head, "choices": [], "usage": body}) + DONE

    def _chunk(self, choice: dict[str, Any], **beside: Any) -> str:
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._head, "choices": [choice], **beside, **usage})
