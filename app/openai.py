"""The requests of OpenAI's API that we answer. A field acts, or it is refused by name."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from actors.errors import RequestRejected
from app.sampling_fields import NumLogprobs, SamplingFields
from app.strict import Inert, Strict, Text

# Of all prompts of a request: an engine takes at least twice as many requests.
_MAX_CHOICES = 256


class StreamOptions(Strict):
    include_usage: bool | None = None

    inert: ClassVar[Inert] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}


class Speculative(Strict):
    """Our extension: whether to draft, and how many drafts a step may verify."""

    enabled: bool | None = None
    max_draft_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _off_drafts_nothing(self) -> Self:
        if self.enabled is False and self.max_draft_tokens:
            raise RequestRejected(
                f"max_draft_tokens is {self.max_draft_tokens} although enabled is false",
                "max_draft_tokens",
            )
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    """One message of a chat. `tool_call_id` goes to the chat template with a tool's message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart]
    tool_call_id: Text | None = None

    inert: ClassVar[Inert] = {
        "name": (),
        "refusal": (),
        "audio": (),
        "function_call": (),
        "annotations": ([],),
        "tool_calls": ([],),
    }

    @model_validator(mode="after")
    def _only_tools_have_calls(self) -> Self:
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


class GenerationRequest(SamplingFields):
    """What both endpoints take. `user` has no effect by OpenAI's definition.

    vLLM's extensions: `return_token_ids`, `priority` (lower goes first) and `cache_salt`.
    """

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    speculative: Speculative | None = None
    user: str | None = None

    # Without a limit a chat gets all that fits.
    default_max_tokens: ClassVar[int | None] = None

    @model_validator(mode="after")
    def _streams_differ(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestRejected("stream_options is only for stream true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestRejected("prompt_logprobs is not for stream true", "prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def limit(self) -> tuple[str, int | None]:
        """How many tokens to emit at most, behind the name of the field that says so."""
        return "max_tokens", self.max_tokens

    @property
    def wants_drafts(self) -> bool:
        """Whether it makes no sense without a drafter."""
        wanted = self.speculative
        return wanted is not None and bool(wanted.enabled or wanted.max_draft_tokens)

    @property
    def max_draft_tokens(self) -> int | None:
        if self.speculative is None:
            return None
        return 0 if self.speculative.enabled is False else self.speculative.max_draft_tokens


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions. `max_completion_tokens` is the newer `max_tokens`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    inert: ClassVar[Inert] = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none",),
        "tools": ([],),
    }

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestRejected(
                f"max_completion_tokens is {new} and max_tokens is {old}; set one",
                "max_completion_tokens",
            )
        return self

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestRejected("top_logprobs is only for logprobs true", "top_logprobs")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _kind_of_prompt(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "Text"
    first = prompt[0] if prompt else None
    return "Texts" if isinstance(first, str) else "IdLists" if isinstance(first, list) else "Ids"


_Prompt = Annotated[
    Annotated[Text, Tag("Text")]
    | Annotated[list[Text], Tag("Texts")]
    | Annotated[list[int], Tag("Ids")]
    | Annotated[list[list[int]], Tag("IdLists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions. A prompt is text or token ids; there may be a list of them."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: _Prompt
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None

    inert: ClassVar[Inert] = {"suffix": ()}

    @model_validator(mode="after")
    def _fits_an_engine(self) -> Self:
        num_prompts = len(self.prompts)
        if num_prompts * self.num_choices > _MAX_CHOICES:
            raise RequestRejected(
                f"prompt holds {num_prompts} prompts and n is {self.num_choices}, "
                f"at most {_MAX_CHOICES} choices are served",
                "prompt",
            )
        return self

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise RequestRejected(
                f"best_of is {self.best_of}, only n, which is {self.num_choices}, is served",
                "best_of",
            )
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if not self.prompt or isinstance(self.prompt[0], int):
            return (_ids(self.prompt),)
        return tuple(part if isinstance(part, str) else _ids(part) for part in self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt has as many as the output."""
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in wanted if count is not None), default=None)


def _ids(prompt: Any) -> tuple[int, ...]:
    return tuple(prompt)
