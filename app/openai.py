"""The requests of OpenAI's API that we answer. A field acts, or it is refused by name."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from actors.errors import RequestRejected

# Fields that do nothing yet, each with the values that ask for nothing; null always does.
_Inert = Mapping[str, tuple[Any, ...]]

_INERT_OPTIONS: _Inert = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
_INERT_MESSAGE: _Inert = {
    "name": (),
    "refusal": (),
    "audio": (),
    "function_call": (),
    "annotations": ([],),
    "tool_calls": ([],),
}
_INERT_COMMON: _Inert = {
    "temperature": (0,),
    "top_p": (1,),
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    # vLLM's extensions
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
}
_INERT_COMPLETION: _Inert = {
    **_INERT_COMMON,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": (),
}
_INERT_CHAT: _Inert = {
    **_INERT_COMMON,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}
_WHY: Mapping[str, str] = {"temperature": "sampling is not available yet"}


def _drop_inert(values: Any, inert: _Inert) -> Any:
    """`values` without its inert fields. Raises `RequestRejected` where one asks for something."""
    if not isinstance(values, dict):
        return values
    for name, value in values.items():
        if name in inert and value is not None and not _among(value, inert[name]):
            allowed = " or ".join(repr(v) for v in (*inert[name], None))
            why = _WHY.get(name, "this is not available yet")
            raise RequestRejected(f"{name} is {value!r:.80}: {why}, only {allowed}", name)
    return {name: value for name, value in values.items() if name not in inert}


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Membership that does not take true for 1."""
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


def _whole(text: str) -> str:
    """JSON may hold half a surrogate pair, which is no text."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise PydanticCustomError("surrogate", "Holds half a surrogate pair: not valid Unicode")
    return text


_Text = Annotated[str, AfterValidator(_whole)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    inert: ClassVar[_Inert] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, values: Any) -> Any:
        return _drop_inert(values, cls.inert)


class StreamOptions(_Strict):
    include_usage: bool | None = None

    inert: ClassVar[_Inert] = _INERT_OPTIONS


class TextPart(_Strict):
    type: Literal["text"]
    text: _Text


class Message(_Strict):
    """One message of a chat. `tool_call_id` goes to the chat template with a tool's message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | list[TextPart]
    tool_call_id: _Text | None = None

    inert: ClassVar[_Inert] = _INERT_MESSAGE

    @model_validator(mode="after")
    def _only_tools_have_calls(self) -> "Message":
        if self.tool_call_id is not None and self.role != "tool":
            raise RequestRejected("tool_call_id is only for messages of role tool", "tool_call_id")
        return self

    def for_template(self) -> dict[str, str]:
        """Templates take one string, and know the developer by its older name."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": content}
        return message | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


_Stop = Annotated[_Text, Field(min_length=1)]


class GenerationRequest(_Strict):
    """What both endpoints take. `stop_token_ids` and `ignore_eos` are vLLM's extensions.

    `user` has no effect by OpenAI's definition, and `seed` none on a greedy result.
    """

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    user: str | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise RequestRejected("stream_options is only for stream true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def limit(self) -> tuple[str, int | None]:
        """How many tokens to emit at most, behind the name of the field that says so."""
        return "max_tokens", self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions. `max_completion_tokens` is the newer `max_tokens`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    inert: ClassVar[_Inert] = _INERT_CHAT

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestRejected(
                f"max_completion_tokens is {new} and max_tokens is {old}; set one",
                "max_completion_tokens",
            )
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions. A prompt is text or token ids, or a list of one of these."""

    prompt: _Text | list[int]

    inert: ClassVar[_Inert] = _INERT_COMPLETION

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            if len(prompt) > 1:
                raise RequestRejected(f"prompt holds {len(prompt)} prompts; send one per request")
            return prompt[0]
        return prompt


def rejection(errors: Sequence[Any]) -> RequestRejected:
    """pydantic's findings as one line, about the first of the deepest: those are the most exact."""
    error = max(errors, key=lambda e: len(e["loc"]))
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "json_invalid":
        return RequestRejected(f"the body is not valid JSON: {cause}")
    field = _path(error["loc"])
    if isinstance(cause, RequestRejected):
        names = [name for name in (field, cause.param) if name]
        return RequestRejected(cause.message, ".".join(names) or None)
    if not field:
        return RequestRejected("the body must be a JSON object, sent as application/json")
    if error["type"] == "extra_forbidden":
        return RequestRejected(f"{field}: unknown field", field)
    if error["type"] == "missing":
        return RequestRejected(f"{field}: required", field)
    return RequestRejected(f"{field}: {error['msg'][0].lower()}{error['msg'][1:]}", field)


# pydantic puts the members of a union it tried into the path: a type, or a model.
_UNION_MEMBER = re.compile(r"str|constrained-str|.*\[.*|[A-Z].*")


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content`"""
    path = ""
    for depth, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif depth == 0:
            path = part
        elif not _UNION_MEMBER.fullmatch(part):
            path += f".{part}"
    return path
