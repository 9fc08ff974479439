"""The bodies we answer with, in OpenAI's shape."""

from typing import Literal

from pydantic import BaseModel

from app.errors import Fault
from app.generation import Result, Usage

FinishReason = Literal["stop", "length"]


class Speculative(BaseModel):
    """What speculation did. `mean_acceptance_length` counts the bonus token."""

    verify_steps: int
    draft_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float | None


class UsageBody(BaseModel):
    """OpenAI's usage, and `speculative`: null without a drafter."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculative: Speculative | None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dflash-serve"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def usage_body(usage: Usage) -> UsageBody:
    stats = usage.speculation
    speculative = None
    if stats is not None:
        speculative = Speculative(
            verify_steps=stats.verify_steps,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            mean_acceptance_length=stats.mean_acceptance_length,
        )
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        speculative=speculative,
    )


def chat_completion(*, id: str, created: int, model: str, result: Result) -> ChatCompletion:
    choice = ChatChoice(
        message=AssistantMessage(content=result.text), finish_reason=result.finish.reason
    )
    usage = usage_body(result.finish.usage)
    return ChatCompletion(id=id, created=created, model=model, choices=[choice], usage=usage)


def completion(*, id: str, created: int, model: str, result: Result) -> Completion:
    choice = CompletionChoice(text=result.text, finish_reason=result.finish.reason)
    usage = usage_body(result.finish.usage)
    return Completion(id=id, created=created, model=model, choices=[choice], usage=usage)


def error_body(fault: Fault) -> ErrorBody:
    return ErrorBody(
        error=ErrorDetail(
            message=fault.message, type=fault.kind.type, param=fault.param, code=fault.kind.code
        )
    )
