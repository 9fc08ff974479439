"""What an output has to look like: OpenAI's `response_format` and vLLM's structured outputs."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from actors.errors import RequestRejected
from actors.messages import Guide
from app.strict import Inert, Strict, Text

_METACHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$]")


def _source_of(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise RequestRejected("this schema is not a JSON object")
    try:
        return json.dumps(schema, separators=(",", ":"))
    except RecursionError:
        raise RequestRejected("this schema is nested too deeply") from None


def _source_of_either(schema: Any) -> str:
    """vLLM takes a schema as JSON in a string too."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"this schema is not valid JSON: {error}") from None
    return _source_of(schema)


_Schema = Annotated[str, BeforeValidator(_source_of_either)]
_Source = Annotated[Text, Field(min_length=1)]
_Choices = Annotated[list[_Source], Field(min_length=1)]


class NamedSchema(Strict):
    """`name` is the client's own, and `strict` asks for what every schema gets here."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    # `schema` is a method of pydantic's models.
    source: Annotated[str, BeforeValidator(_source_of)] = Field(alias="schema")
    strict: bool | None = None

    inert: ClassVar[Inert] = {"description": ()}


class ResponseFormat(Strict):
    """OpenAI's: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_by_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise RequestRejected(
                "json_schema is required for type json_schema, and only for it", "json_schema"
            )
        return self

    @property
    def guide(self) -> Guide | None:
        if self.json_schema is not None:
            return Guide(kind="json_schema", source=self.json_schema.source)
        return Guide(kind="json_object") if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's: exactly one of its fields."""

    json_: _Schema | None = Field(default=None, alias="json")
    regex: _Source | None = None
    choice: _Choices | None = None
    grammar: _Source | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self._guides()) != 1:
            raise RequestRejected(
                "exactly one of json, regex, choice, grammar and json_object is required"
            )
        return self

    @property
    def guide(self) -> Guide:
        (guide,) = self._guides()
        return guide

    def _guides(self) -> list[Guide]:
        named = _guides(self.json_, self.regex, self.choice, self.grammar)
        return [*named.values(), *([Guide(kind="json_object")] if self.json_object else [])]


class GuideFields(Strict):
    """Every field that can hold a guide, of which one may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Source | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Source | None = None

    @model_validator(mode="after")
    def _one_guide(self) -> Self:
        names = list(self._guides_by_field())
        if len(names) > 1:
            raise RequestRejected(f"{' and '.join(names)} are set; set one", names[1])
        return self

    @property
    def guide(self) -> Guide | None:
        return next(iter(self._guides_by_field().values()), None)

    def _guides_by_field(self) -> dict[str, Guide]:
        found = _guides(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        guides = {f"guided_{name}": guide for name, guide in found.items()}
        if self.response_format is not None and self.response_format.guide is not None:
            guides["response_format"] = self.response_format.guide
        if self.structured_outputs is not None:
            guides["structured_outputs"] = self.structured_outputs.guide
        return guides


def choice_guide(choices: Sequence[str]) -> Guide:
    """One of `choices`, as they stand."""
    escaped = (_METACHARACTERS.sub(r"\\\g<0>", choice) for choice in choices)
    return Guide(kind="regex", source="|".join(escaped))


def _guides(
    schema: str | None,
    regex: str | None,
    choices: Sequence[str] | None,
    grammar: str | None,
) -> dict[str, Guide]:
    """Those that are set, by what vLLM calls them."""
    guides = {}
    if schema is not None:
        guides["json"] = Guide(kind="json_schema", source=schema)
    if regex is not None:
        guides["regex"] = Guide(kind="regex", source=regex)
    if choices is not None:
        guides["choice"] = choice_guide(choices)
    if grammar is not None:
        guides["grammar"] = Guide(kind="grammar", source=grammar)
    return guides
