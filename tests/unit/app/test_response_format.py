import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from actors.errors import RequestRejected
from actors.messages import Guide
from app.response_format import GuideFields
from app.strict import rejection

SCHEMA = {"type": "object", "properties": {"b": {"enum": ["日"]}, "a": {"type": "integer"}}}
SOURCE = json.dumps(SCHEMA, separators=(",", ":"))
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}


def refusal(fields: Any) -> RequestRejected:
    with pytest.raises(ValidationError) as caught:
        GuideFields.model_validate(fields)
    return rejection(caught.value.errors())


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            Guide(kind="json_schema", source=SOURCE),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Guide(kind="json_schema", source=SOURCE)),
        ({"structured_outputs": {"regex": "a+"}}, Guide(kind="regex", source="a+")),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            Guide(kind="grammar", source='start: "a"'),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Guide(kind="regex", source="a|b")),
        ({"structured_outputs": {"json_object": True}}, Guide(kind="json_object")),
        (
            {"structured_outputs": {"json_object": False, "regex": "a"}},
            Guide(kind="regex", source="a"),
        ),
        ({"guided_json": SCHEMA}, Guide(kind="json_schema", source=SOURCE)),
        ({"guided_json": json.dumps(SCHEMA)}, Guide(kind="json_schema", source=SOURCE)),
        ({"guided_regex": "[a-z]+"}, Guide(kind="regex", source="[a-z]+")),
        ({"guided_choice": ["yes", "no"]}, Guide(kind="regex", source="yes|no")),
        ({"guided_grammar": 'start: "a"'}, Guide(kind="grammar", source='start: "a"')),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a"},
            Guide(kind="regex", source="a"),
        ),
    ],
)
def test_every_guide_acts(fields: dict[str, Any], guide: Guide | None) -> None:
    assert GuideFields.model_validate(fields).guide == guide


def test_choices_are_taken_as_they_stand() -> None:
    choices = ["a.b", "(x|y)*", "c+d?", "[1]{2}", "^$", "back\\slash", "a b", "-日-", "a\nb"]
    source = GuideFields.model_validate({"guided_choice": choices}).guide.source
    assert all(re.fullmatch(source, choice) for choice in choices)
    for other in ["aXb", "x", "ccd", "11", "", "a.b(x|y)*"]:
        assert re.fullmatch(source, other) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": NAMED}},
            "response_format.json_schema",
        ),
        *(
            (
                {"response_format": {"type": "json_schema", "json_schema": NAMED | changes}},
                f"response_format.json_schema.{name}",
            )
            for changes, name in [
                ({"name": "two words"}, "name"),
                ({"schema": "{}"}, "schema"),
                ({"schema": None}, "schema"),
                ({"description": "how to respond"}, "description"),
                ({"strict": 1}, "strict"),
            ]
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"json_object": True},
            },
            "structured_outputs",
        ),
    ],
)
def test_guides_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(fields).param == param


@pytest.mark.parametrize("as_text", [False, True])
def test_a_schema_without_a_bottom(as_text: bool) -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {"not": schema}
    text = '{"not":' * 5000 + "{}" + "}" * 5000
    assert refusal({"guided_json": text if as_text else schema}).param == "guided_json"
