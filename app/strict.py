"""Bodies in which every field acts or is refused by name, and the words for a refusal."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from actors.errors import RequestRejected

# Fields that do nothing, each with the values that ask for nothing; null always does.
Inert = Mapping[str, tuple[Any, ...]]


class Strict(BaseModel):
    """No coercion, no unknown field. `inert` are fields known to OpenAI's API that can't act."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    inert: ClassVar[Inert] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, values: Any) -> Any:
        return _drop_inert(values, cls.inert)


def _whole(text: str) -> str:
    """JSON may hold half a surrogate pair, which is no text."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise PydanticCustomError("surrogate", "Holds half a surrogate pair: not valid Unicode")
    return text


Text = Annotated[str, AfterValidator(_whole)]


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


def _drop_inert(values: Any, inert: Inert) -> Any:
    """`values` without its inert fields. Raises `RequestRejected` where one asks for something."""
    if not isinstance(values, dict):
        return values
    for name, value in values.items():
        if name in inert and value is not None and not _among(value, inert[name]):
            allowed = " or ".join(repr(v) for v in (*inert[name], None))
            raise RequestRejected(f"{name} is {value!r:.80}: only {allowed} is served", name)
    return {name: value for name, value in values.items() if name not in inert}


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Membership that does not take true for 1."""
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


# pydantic puts the members of a union it tried into the path: a type, a model, or a tag.
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
