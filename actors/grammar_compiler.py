"""From a request's guide to a matcher that knows which tokens may come next."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from actors.errors import RequestRejected
from actors.messages import Guide

# The request field that a guide of each kind comes from.
FIELDS: Mapping[str, str] = {
    "json_object": "response_format",
    "json_schema": "response_format",
    "regex": "guided_regex",
    "grammar": "guided_grammar",
}
MAX_CHARS = 65_536
_MAX_LINES = 4
_MAX_LINE_CHARS = 160

# They bound a mask to some tens of milliseconds and a compiled grammar to some tens of MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_max_items=20_000,
    max_lexer_states=25_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Compiles guides for one target. Its tokenizer is read when the first one is compiled."""

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`directory` is the checkpoint's, `vocab_size` the model's, which may have more ids than
        the tokenizer: those are never allowed."""
        self.directory = directory
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Raises `ValueError` where the checkpoint has none that grammars can work with."""
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError("this model has no tokenizer.json, which guided output needs")
        return LLTokenizer(
            path.read_text(encoding="utf-8"),
            n_vocab=self.vocab_size,
            eos_token=list(self.eos_token_ids),
        )

    @property
    def num_words(self) -> int:
        """How many int32 a mask has."""
        return -(-self.vocab_size // 32)

    @cached_property
    def end_mask(self) -> bytes:
        """Allows the end tokens only."""
        bits = sum(1 << token for token in set(self.eos_token_ids))
        return bits.to_bytes(4 * self.num_words, "little")

    def compile(self, guide: Guide) -> LLMatcher:
        """A matcher at the start of `guide`.

        Neither time nor stack are bounded here: `actors.grammar_probe` tells what is safe.
        Raises `RequestRejected` where the guide is too long, is invalid or matches no text.
        """
        check_length(guide)
        try:
            matcher = LLMatcher(self.tokenizer, _grammar(guide), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise refusal(guide, _one_line(str(error))) from None
        # Shows some errors that the grammar alone does not, and is what every request needs first.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(guide, failure_of(matcher))
        return matcher


def check_length(guide: Guide) -> None:
    """Raises `RequestRejected` where the source has more than `MAX_CHARS` characters."""
    if len(guide.source) > MAX_CHARS:
        raise refusal(guide, f"has {len(guide.source)} characters, the limit is {MAX_CHARS}")


def refusal(guide: Guide, reason: str) -> RequestRejected:
    """What to raise where `guide` can't be used; names the request's field."""
    field = FIELDS[guide.kind]
    return RequestRejected(f"{field}: {reason}", field)


def failure_of(matcher: LLMatcher) -> str:
    """Why `matcher`, which is in an error state, is so: one line."""
    text = _one_line(matcher.get_error().removesuffix("<non-verbose/>"))
    return "no text matches it from here on" if text == "NoExtensionBias" else text


def _one_line(text: str) -> str:
    """An explanation without the lines that draw the source, and little of it where it is quoted
    before the reason."""
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    return " ".join(line[:_MAX_LINE_CHARS] for line in lines[:_MAX_LINES])


def _grammar(guide: Guide) -> str:
    """The library's form of a guide. Raises `ValueError` for a schema that is no JSON object."""
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.source)
    if guide.kind == "grammar":
        return LLMatcher.grammar_from_lark(guide.source)
    return LLMatcher.grammar_from_json_schema(
        guide.source if guide.kind == "json_schema" else '{"type": "object"}',
        # One space behind a comma or colon, as models write it, and none elsewhere: with more,
        # sampling could wander in it for ever. All four, since a schema can set each of them.
        overrides={
            "item_separator": ", ?",
            "key_separator": ": ?",
            "whitespace_flexible": False,
            "whitespace_pattern": None,
        },
    )
