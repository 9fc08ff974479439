"""The bodies around what was generated, in OpenAI's shape."""

from typing import Literal

from pydantic import BaseModel

from app.errors import Fault
from app.generation import Usage


class Speculative(BaseModel):
    """What speculation did. `mean_acceptance_length` counts the bonus token."""

    verify_steps: int
    draft_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float | None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    """OpenAI's usage, and `speculative`: null without a drafter."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculative: Speculative | None


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
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        speculative=speculative,
    )


def error_body(fault: Fault) -> ErrorBody:
    return ErrorBody(
        error=ErrorDetail(
            message=fault.message, type=fault.kind.type, param=fault.param, code=fault.kind.code
        )
    )
