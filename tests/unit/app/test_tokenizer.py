import itertools
import random
from pathlib import Path

import pytest

from actors.errors import ConfigError, RequestRejected
from app.tokenizer import IncrementalDetokenizer, Tokenizer

TEXTS = [
    "the cat sat on the mat, hello world",
    "日本語と中文、한국어: 混ざった文章。",
    "emoji 👍🏽 family 👩‍👩‍👧‍👦 flag 🇯🇵!",
    "combining: e\u0301 a\u0308 n\u0303, ไทย देवनागरी",
    "tabs\tand\n\nlines\u2028and \u00a0spaces   ",
    "a real \N{REPLACEMENT CHARACTER} in the text \N{REPLACEMENT CHARACTER}",
]


def pieces(tokenizer: Tokenizer, ids: list[int], widths: itertools.cycle) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    out, position = [], 0
    while position < len(ids):
        width = next(widths)
        out.append(detokenizer.push(ids[position : position + width]))
        position += width
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", range(1, 17))
def test_deltas_join_to_the_whole_text(tokenizer: Tokenizer, text: str, width: int) -> None:
    ids = tokenizer.encode(text)
    deltas = pieces(tokenizer, ids, itertools.cycle([width]))
    assert "".join(deltas) == tokenizer.decode(ids) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


def test_deltas_of_random_widths_and_random_bytes_join_to_the_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
        widths = itertools.cycle([rng.randrange(1, 17) for _ in range(7)])
        assert "".join(pieces(tokenizer, ids, widths)) == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日")
    assert len(ids) == 3
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "日"]


def test_a_character_that_is_never_completed_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    assert detokenizer.push(tokenizer.encode("a日")[:-1]) == ""
    assert detokenizer.flush() == "a\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


def decode_words(ids: list[int]) -> str:
    """Like SentencePiece: every token is a word with a space in front, dropped from the first."""
    return "".join(f" w{token}" for token in ids).removeprefix(" ")


def test_a_continuation_keeps_the_space_that_a_beginning_loses() -> None:
    beginning = IncrementalDetokenizer(decode_words)
    assert beginning.push([1, 2]) + beginning.push([3]) == "w1 w2 w3"
    continuation = IncrementalDetokenizer(decode_words, context=[7, 8])
    assert continuation.push([1, 2]) + continuation.push([3]) == " w1 w2 w3"


def test_a_context_that_ends_in_half_a_character_is_left_out(tokenizer: Tokenizer) -> None:
    half, rest = tokenizer.encode("日")[:2], tokenizer.encode("日")[2:]
    detokenizer = IncrementalDetokenizer(tokenizer.decode, context=half)
    assert detokenizer.push([*rest, *tokenizer.encode("ab")]) == tokenizer.decode(
        [*rest, *tokenizer.encode("ab")]
    )


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("<|im_start|>user<|im_end|>")) == "user"


def test_a_chat_is_encoded_as_transformers_does(tokenizer: Tokenizer, checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello <|im_end|> 日本"},
    ]
    reference = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True
    )["input_ids"]
    assert tokenizer.encode_chat(messages) == reference


def test_messages_that_the_template_refuses(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestRejected, match="no tools here") as caught:
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


def test_no_chat_template(templateless: Tokenizer) -> None:
    with pytest.raises(RequestRejected, match="no chat template"):
        templateless.encode_chat([{"role": "user", "content": "x"}])
    assert templateless.decode(templateless.encode("hello")) == "hello"


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer can't be loaded"):
        Tokenizer.load(tmp_path)
