import random

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from app.tokenizer import Tokenizer
from tests.unit.app.fakes import EOS


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As Llama 2's: spaces are `▁`, and bytes that no token has are tokens of their own."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = RustTokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids)


@pytest.mark.parametrize("text", ["the cat, hello  world\n", "日本語 한국어", "👩‍👩‍👧‍👦 e\u0301"])
def test_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert joined(tokenizer, tokenizer.encode(text)) == text.encode()


def test_bytes_of_any_tokens_join_to_what_decode_says(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(2, 300) for _ in range(rng.randrange(1, 30))]
        assert joined(tokenizer, ids).decode(errors="replace") == tokenizer.decode(ids)


def test_sentencepiece(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a b日")
    assert joined(sentencepiece, ids) == " a b日".encode()
    assert sentencepiece.token_bytes(ids[-1]) == "日".encode()[-1:]
    assert sentencepiece.token_bytes.text(ids[0]) == " a"
    assert sentencepiece.token_bytes.is_special(1)


def test_a_part_of_a_character_is_written_in_bytes(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("日")
    assert tokenizer.token_bytes(first) == b"\xe6"
    assert tokenizer.token_bytes.text(first) == r"\xe6"


def test_special_tokens_are_written_out(tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.encode(EOS)
    assert tokenizer.token_bytes.text(eos) == EOS
    assert tokenizer.token_bytes.is_special(eos)
    assert not tokenizer.token_bytes.is_special(eos + 1)


def test_ids_beyond_the_tokenizer_have_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(299) == b""
    assert tokenizer.token_bytes.text(299) == ""


def test_banned_words(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    def banned(word: str) -> list[list[int]]:
        return tokenizer.encode_banned(word)

    # "the" has one token, and " the" another.
    assert banned("the") == banned("  the") == [tokenizer.encode("the"), tokenizer.encode(" the")]
    assert [len(form) for form in banned("the")] == [1, 1]
    # " ü" is a space and the same tokens again, which the first form finds too.
    assert banned("ü") == [tokenizer.encode("ü")]
    assert banned(" ") == [[]]
