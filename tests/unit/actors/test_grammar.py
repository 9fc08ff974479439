import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from actors import grammar_compiler
from actors.errors import RequestRejected
from actors.grammar import MAX_COMPILED, Grammars, GrammarState
from actors.grammar_compiler import MAX_CHARS
from actors.grammar_probe import GrammarProbe
from actors.messages import Guide

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_IDS = (2, 0)
TOKENIZER_SIZE = 360
VOCAB_SIZE = 390  # neither a multiple of 32 nor all of it known to the tokenizer
CORPUS = [
    '{"name": "anna", "age": 31, "tags": ["red", "green"], "nested": {"deep": [true, false]}}',
    '{"a":1,"b":2,"c":null},{"a":-10,"b":20},[[1, 2], [3, 4]], "x": "y", "z": ""}]}',
    "the cat sat on the mat, 12:30 on 2024-01-02; über naïve 日本語 👍🏽",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer whose tokens often span several JSON tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=6,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Iterator[Grammars]:
    with closing(make(checkpoint)) as grammars:
        yield grammars


def make(checkpoint: Path) -> Grammars:
    return Grammars(checkpoint, vocab_size=VOCAB_SIZE, eos_token_ids=END_IDS)


def schema(value: object) -> Guide:
    return Guide(kind="json_schema", source=json.dumps(value))


def regex(source: str) -> Guide:
    return Guide(kind="regex", source=source)


def lark(source: str) -> Guide:
    return Guide(kind="grammar", source=source)


def allowed(mask: bytes) -> list[int]:
    assert len(mask) == 4 * -(-VOCAB_SIZE // 32)
    bits = int.from_bytes(mask, "little")
    return [token for token in range(8 * len(mask)) if bits >> token & 1]


def walk(state: GrammarState, rng: random.Random, most: int = 500) -> list[int]:
    """Commit random allowed tokens up to an end token; return those before it."""
    tokens: list[int] = []
    while len(tokens) < most:
        token = rng.choice(allowed(state.masks(())[1][0]))
        state.commit([token])
        if token in END_IDS:
            assert state.finished
            assert not state.failure
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens")


def keys(value: object, required: set[str], optional: set[str]) -> bool:
    return isinstance(value, dict) and required <= set(value) <= required | optional


def integer(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


Check = Callable[[Any], bool]
SCHEMAS: list[tuple[dict[str, object], Check]] = [
    ({"enum": ["red", "green", 3, None]}, lambda v: v in ("red", "green", 3, None)),
    ({"type": "integer", "minimum": -10, "maximum": 120}, lambda v: integer(v, -10, 120)),
    ({"type": "string", "maxLength": 5}, lambda v: isinstance(v, str) and len(v) <= 5),
    ({"type": "boolean"}, lambda v: type(v) is bool),
    ({"type": "null"}, lambda v: v is None),
    (
        {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 1, "maxItems": 4},
        lambda v: isinstance(v, list) and 1 <= len(v) <= 4 and all(i in ("a", 1) for i in v),
    ),
    (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "nested": {
                    "type": "object",
                    "properties": {
                        "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
                    },
                    "required": ["deep"],
                    "additionalProperties": False,
                },
            },
            "required": ["name", "nested"],
            "additionalProperties": False,
        },
        lambda v: (
            keys(v, {"name", "nested"}, {"age"})
            and re.fullmatch("[a-z]{1,8}", v["name"])
            and integer(v.get("age", 0), 0, 150)
            and keys(v["nested"], {"deep"}, {"note"})
            and len(v["nested"]["deep"]) <= 3
            and all(type(item) is bool for item in v["nested"]["deep"])
            and len(v["nested"].get("note") or "") <= 3
        ),
    ),
]
REGEXES = ["[0-9]{2,4}", "(cat|dog)s?", "[a-f]+x{0,3}", r"\p{L}{1,3}-[日本語]", ""]
LARKS = [
    ('start: "[" item ("," item)~0..3 "]"\nitem: "a" | "b" start?', r"[\[\],ab]+"),
    ("start: WORD (/ /) NUMBER\nWORD: /[a-z]{1,4}/\nNUMBER: /[0-9]{1,3}/", "[a-z]{1,4} [0-9]{1,3}"),
]
GUIDES = [
    *(schema(source) for source, _ in SCHEMAS),
    *(regex(source) for source in REGEXES),
    *(lark(source) for source, _ in LARKS),
    Guide(kind="json_object"),
]


@pytest.mark.parametrize(("source", "check"), SCHEMAS, ids=lambda value: "")
def test_walks_give_json_of_the_schema(
    grammars: Grammars, tokenizer: Tokenizer, source: dict[str, object], check: Check
) -> None:
    for seed in range(40):
        text = tokenizer.decode(walk(grammars.start(schema(source)), random.Random(seed)))
        assert check(json.loads(text)), text
        assert "\N{REPLACEMENT CHARACTER}" not in text  # no broken characters


@pytest.mark.parametrize("source", REGEXES)
def test_walks_match_the_regex(grammars: Grammars, tokenizer: Tokenizer, source: str) -> None:
    pattern = source.replace(r"\p{L}", r"[^\W\d_]")
    for seed in range(40):
        text = tokenizer.decode(walk(grammars.start(regex(source)), random.Random(seed)))
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(("source", "pattern"), LARKS)
def test_walks_match_the_lark_grammar(
    grammars: Grammars, tokenizer: Tokenizer, source: str, pattern: str
) -> None:
    for seed in range(40):
        text = tokenizer.decode(walk(grammars.start(lark(source)), random.Random(seed)))
        assert re.fullmatch(pattern, text), text
        assert text.count("[") == text.count("]")


@pytest.mark.parametrize("value", [{}, {"a": [1, {"b": None}], "c": "ü\n"}, {"k": -1.5e3}])
@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_json_object_is_any_object(
    grammars: Grammars, tokenizer: Tokenizer, value: object, separators: tuple[str, str]
) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=False)
    state = grammars.start(Guide(kind="json_object"))
    state.commit([*tokenizer.encode(text).ids, END_IDS[1]])
    assert state.finished


@pytest.mark.parametrize(
    "text", ["[1]", "1", " {", '{"a":  1', '{"a" :', '{ "a"', '{"a":\n', "{ }"]
)
def test_json_has_no_more_whitespace_than_a_space_behind_a_separator(
    grammars: Grammars, tokenizer: Tokenizer, text: str
) -> None:
    guides = [Guide(kind="json_object")]
    # A schema can't bring whitespace back.
    guides.append(schema({"type": "object", "x-guidance": {"whitespace_flexible": True}}))
    guides.append(schema({"type": "object", "x-guidance": {"whitespace_pattern": "[ \\n]*"}}))
    ids = tokenizer.encode(text).ids
    for guide in guides:
        assert grammars.start(guide).masks(ids)[0] < len(ids)


@given(seed=st.integers(0, 2**32), guide=st.sampled_from(GUIDES))
def test_masks_with_drafts_are_those_of_committing_one_by_one(
    grammars: Grammars, seed: int, guide: Guide
) -> None:
    rng = random.Random(seed)
    state, oracle = grammars.start(guide), grammars.start(guide)
    for _ in range(8):
        before = state.masks(())
        wanted = oracle.masks(())[1]
        drafts: list[int] = []
        for _ in range(rng.randrange(8)):
            tokens = allowed(wanted[-1])
            drafts.append(rng.choice(tokens if rng.random() < 0.9 else range(VOCAB_SIZE)))
            if oracle.finished or drafts[-1] not in tokens:
                drafts += [rng.randrange(VOCAB_SIZE) for _ in range(2)]
                break
            oracle.commit(drafts[-1:])
            wanted += oracle.masks(())[1]
        num_allowed = len(wanted) - 1
        assert state.masks(drafts) == (num_allowed, wanted)
        assert state.masks(()) == before
        state.commit(drafts[:num_allowed])
        if state.finished:
            return


@given(seed=st.integers(0, 2**32), guide=st.sampled_from(GUIDES))
def test_a_replayed_state_gives_the_same_masks(
    grammars: Grammars, checkpoint: Path, seed: int, guide: Guide
) -> None:
    rng = random.Random(seed)
    state = grammars.start(guide)
    tokens: list[int] = []
    while len(tokens) < 12 and not state.finished:
        state.masks([rng.randrange(VOCAB_SIZE) for _ in range(3)])
        tokens.append(rng.choice(allowed(state.masks(())[1][0])))
        state.commit(tokens[-1:])
    replayed = grammars.start(guide)
    replayed.commit(tokens)
    drafts = [rng.choice(allowed(state.masks(())[1][0]))]
    assert replayed.masks(drafts) == state.masks(drafts)
    assert replayed.finished == state.finished


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte, whatever the tokenizer would merge."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[character] for character in text]


def test_drafts_are_cut_where_the_grammar_forbids_one(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    state = grammars.start(regex("[0-9]{2,4}"))
    five, x = ids_of(tokenizer, "5x")
    for drafts, num_allowed in [
        ([], 0),
        ([x, five], 0),
        ([five, x, five], 1),
        ([END_IDS[0]], 0),
        ([five, END_IDS[0]], 1),
        ([five] * 6, 4),
    ]:
        found, masks = state.masks(drafts)
        assert found == num_allowed
        assert len(masks) == num_allowed + 1


@pytest.mark.parametrize("end", END_IDS)
def test_nothing_follows_an_end_token(grammars: Grammars, tokenizer: Tokenizer, end: int) -> None:
    state = grammars.start(regex("[0-9]{2,4}"))
    (five,) = ids_of(tokenizer, "5")
    num_allowed, masks = state.masks([five, five, end, five])
    assert num_allowed == 3
    assert set(END_IDS) < set(allowed(masks[2]))  # may stop or go on
    assert allowed(masks[3]) == sorted(END_IDS)
    assert state.masks([five] * 4 + [end, end])[0] == 5
    state.commit([five, five, end])
    assert state.finished
    assert state.masks([end, five]) == (0, [masks[3]])
    state.commit([end])  # of a request that ignores them
    with pytest.raises(AssertionError):
        state.commit([five])


def test_only_end_tokens_are_allowed_behind_a_whole_text(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    state = grammars.start(regex("[0-9]{2}"))
    state.commit(ids_of(tokenizer, "55"))
    assert allowed(state.masks(())[1][0]) == sorted(END_IDS)
    assert not state.finished


@pytest.mark.parametrize("text", ["x", "5x", "555555"])
def test_committing_what_the_grammar_forbids_is_a_bug(
    grammars: Grammars, tokenizer: Tokenizer, text: str
) -> None:
    with pytest.raises(AssertionError):
        grammars.start(regex("[0-9]{2,4}")).commit(ids_of(tokenizer, text))


def test_committing_an_end_token_too_early_is_a_bug(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    with pytest.raises(AssertionError):
        grammars.start(regex("[0-9]{2,4}")).commit([*ids_of(tokenizer, "5"), END_IDS[0]])


def test_special_and_unknown_ids_are_never_text(grammars: Grammars) -> None:
    state = grammars.start(regex("(?s:.)*"))
    tokens = set(allowed(state.masks(())[1][0]))
    assert tokens & set(range(len(SPECIAL_TOKENS))) == set(END_IDS)
    assert max(tokens) < TOKENIZER_SIZE
    # The bytes of longer characters are tokens too, but not all may begin one.
    assert len(tokens) > TOKENIZER_SIZE - 110


@pytest.mark.parametrize("vocab_size", [TOKENIZER_SIZE, 384, 385])
def test_a_mask_has_a_bit_for_every_id_of_the_model(checkpoint: Path, vocab_size: int) -> None:
    grammars = Grammars(checkpoint, vocab_size=vocab_size, eos_token_ids=END_IDS)
    (first,) = grammars.start(regex("(?s:.)*")).masks(())[1]
    (behind_end,) = grammars.start(regex("")).masks(())[1]
    assert len(first) == len(behind_end) == 4 * -(-vocab_size // 32)
    assert int.from_bytes(first, "little") < 1 << TOKENIZER_SIZE
    assert int.from_bytes(behind_end, "little") == sum(1 << token for token in END_IDS)


def test_a_lark_grammar_may_name_a_special_token(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.start(lark('start: "a" <|im_start|>'))
    start = SPECIAL_TOKENS.index("<|im_start|>")
    num_allowed, _ = state.masks([*ids_of(tokenizer, "a"), start, END_IDS[0]])
    assert num_allowed == 3


def test_a_tokenizer_saved_with_truncation_and_padding_guides_too(
    grammars: Grammars, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_truncation(max_length=2)
    other.enable_padding(length=8, pad_id=1)
    other.save(str(tmp_path / "tokenizer.json"))
    guide, drafts = schema({"const": "the cat sat"}), tokenizer.encode('"the cat sat"').ids
    expected = grammars.start(guide).masks(drafts)
    assert expected[0] == len(drafts)
    assert make(tmp_path).start(guide).masks(drafts) == expected


def test_a_probe_that_can_not_run_is_not_the_guides_fault(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="probe of guides ended with status 1"):
        make(checkpoint).check(regex("a"))


def test_a_character_may_be_split_between_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.start(schema({"const": "語"}))
    data = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((mapped, _),) = data.pre_tokenize_str('"語"')
    ids = ids_of(tokenizer, mapped)
    assert len(ids) == 5
    num_allowed, masks = state.masks([*ids[:2], END_IDS[0]])
    assert num_allowed == 2
    assert not set(END_IDS) & set(allowed(masks[2]))
    state.commit([*ids, END_IDS[0]])
    assert state.finished


def rejected(grammars: Grammars, guide: Guide) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        grammars.check(guide)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 800
    return caught.value


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
def test_what_compiles_passes_the_check(grammars: Grammars, guide: Guide) -> None:
    grammars.check(guide)


@pytest.mark.parametrize(
    ("guide", "param", "words"),
    [
        (schema({"type": "nonsense"}), "response_format", "nonsense"),
        (schema({"not": {"type": "null"}}), "response_format", "not"),
        (schema([]), "response_format", "object"),
        (Guide(kind="json_schema", source="{"), "response_format", "EOF"),
        (
            schema({"minLength": 3, "maxLength": 2, "type": "string"}),
            "response_format",
            "minLength",
        ),
        (regex("(a"), "guided_regex", "unclosed group"),
        (regex("(?=a)b"), "guided_regex", "look-ahead"),
        (regex(r"[^\s\S]"), "guided_regex", "no text matches"),
        (regex("\ud800"), "guided_regex", "Unicode"),
        (lark("start: nowhere"), "guided_grammar", "nowhere"),
        (lark(""), "guided_grammar", "Empty"),
        (lark('start: start "a"'), "guided_grammar", "no text matches"),
    ],
    ids=lambda value: "",
)
def test_an_invalid_guide_is_refused(
    grammars: Grammars, guide: Guide, param: str, words: str
) -> None:
    error = rejected(grammars, guide)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    "guide",
    [
        regex("a" * (MAX_CHARS + 1)),
        regex("(" * 30_000 + "a" + ")" * 30_000),
        Guide(kind="json_schema", source='{"items":' * 7000 + "{}" + "}" * 7000),
        # Overflows the stack.
        lark("".join(f"r{i}: r{i + 1} r{i + 1}?\n" for i in range(2500)) + 'r2500: "x"\nstart: r0'),
        # Compiles for longer than anyone has waited.
        schema({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]}),
    ],
    ids=["long", "parentheses", "deep", "rules", "intersections"],
)
def test_a_hostile_guide_is_refused_soon(grammars: Grammars, guide: Guide) -> None:
    start = time.process_time()
    assert rejected(grammars, guide).param
    assert time.process_time() - start < 1  # what it took another process is bounded there


def test_a_verdict_is_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = regex("a verdict"), regex("a (verdict")
    grammars.check(good)
    rejected(grammars, bad)
    monkeypatch.setattr(GrammarProbe, "ask", lambda *_: pytest.fail("asked again"))
    grammars.check(good)
    rejected(grammars, bad)


def test_nothing_is_read_before_the_first_guide(tmp_path: Path) -> None:
    with closing(make(tmp_path)) as grammars:
        assert "tokenizer.json" in rejected(grammars, regex("a")).message


def test_a_process_answers_until_it_is_closed(checkpoint: Path) -> None:
    hostile = schema({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]})
    grammars = make(checkpoint)
    grammars.close()
    for _ in range(2):
        grammars.check(regex("a"))
        process = grammars._probe._process
        assert process is not None
        rejected(grammars, hostile)
        grammars.check(regex("b"))
        assert grammars._probe._process is process
        assert process.poll() is None
        grammars.close()
        assert process.returncode == 0
        grammars._verdicts.clear()


def test_a_process_that_is_lost_is_replaced(checkpoint: Path) -> None:
    with closing(make(checkpoint)) as grammars:
        grammars.check(regex("a"))
        process = grammars._probe._process
        assert process is not None
        process.kill()
        process.wait()
        with pytest.raises(RuntimeError, match="status -9"):
            grammars.check(regex("b"))
        grammars.check(regex("b"))


def counted(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> list[Guide]:
    compiled: list[Guide] = []
    compile_guide = grammars._compiler.compile

    def compile_and_count(guide: Guide) -> Any:
        compiled.append(guide)
        return compile_guide(guide)

    monkeypatch.setattr(grammars._compiler, "compile", compile_and_count)
    return compiled


def test_a_guide_is_compiled_once_while_it_is_in_use(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = make(checkpoint)
    compiled = counted(grammars, monkeypatch)
    for _ in range(200):
        grammars.start(regex("popular"))
    assert compiled == [regex("popular")]
    others = [regex(f"x{i}") for i in range(MAX_COMPILED)]
    for guide in others:
        grammars.start(guide)
        grammars.start(regex("popular"))
    assert compiled == [regex("popular"), *others]
    grammars.start(others[0])  # the least recently used one made room
    assert compiled == [regex("popular"), *others, others[0]]


MANY_STATES = regex("(?s:.*)a.{40}b")


def limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    monkeypatch.setattr(grammar_compiler, "LIMITS", LLParserLimits(verbose_errors=False, **limits))


def emit(state: GrammarState, tokens: Sequence[int]) -> int:
    """Commit tokens, with a mask each, until the state fails; how many it took."""
    for count, token in enumerate(tokens):
        state.masks(tokens[count : count + 3])
        if state.failure:
            return count
        state.commit([token])
    return len(tokens)


def test_a_grammar_that_takes_too_much_ends_its_request(
    checkpoint: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, max_lexer_states=600)
    state = make(checkpoint).start(MANY_STATES)
    rng = random.Random(0)
    tokens = ids_of(tokenizer, "".join(rng.choice("abc") for _ in range(400)))
    assert 0 < emit(state, tokens) < len(tokens)
    assert "states" in state.failure
    num_allowed, masks = state.masks(tokens)
    assert num_allowed == 0
    assert [allowed(mask) for mask in masks] == [sorted(END_IDS)]
    state.commit([END_IDS[0]])
    assert state.finished


def test_a_request_does_not_fail_for_what_others_took(
    checkpoint: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, max_lexer_states=600)
    grammars = make(checkpoint)
    rng = random.Random(1)
    waiting = grammars.start(MANY_STATES)
    waiting.commit(ids_of(tokenizer, "ab"))
    expected = waiting.masks(())
    for _ in range(20):
        text = "".join(rng.choice("abc") for _ in range(6))
        state = grammars.start(MANY_STATES)
        assert emit(state, ids_of(tokenizer, text)) == len(text)
    emit(grammars.start(MANY_STATES), ids_of(tokenizer, "abcab" * 100))
    assert waiting.masks(()) == expected
    assert not waiting.failure
