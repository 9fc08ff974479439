import random
from typing import Any

import pytest

from actors.messages import TokenLogprobs
from app.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from app.tokenizer import Tokenizer
from tests.unit.app.fakes import EOS, logprobs_of


def chunks(logprobs: CompletionLogprobs, ids: list[int], width: int) -> dict[str, list[Any]]:
    """What comes of `ids` in runs of `width`, put together."""
    found: dict[str, list[Any]] = {}
    for first in range(0, len(ids), width):
        run = ids[first : first + width]
        body = logprobs.output(run, [logprobs_of(token, 2) for token in run])
        for name, values in body.items():
            found.setdefault(name, []).extend(values)
    return found


def test_a_chats_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the 日!")
    tokens = tokenizer.token_bytes
    content = chat_logprobs(tokens, ids, [logprobs_of(t, 2) for t in ids])["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "the 日!"
    assert content[-1] == {
        "token": "!",
        "bytes": [33],
        "logprob": -ids[-1] / 8,
        "top_logprobs": [
            {"token": tokens.text(60), "bytes": list(tokens(60)), "logprob": 0.0},
            {"token": tokens.text(61), "bytes": list(tokens(61)), "logprob": -0.25},
        ],
    }


@pytest.mark.parametrize("width", [1, 2, 3, 50])
def test_offsets_are_where_tokens_begin_in_the_text(tokenizer: Tokenizer, width: int) -> None:
    text = "the 日本 cat 👍🏽 sat"
    ids = [*tokenizer.encode(text), *tokenizer.encode(EOS)]
    body = chunks(CompletionLogprobs(tokenizer.token_bytes, 2), ids, width)
    for index, offset in enumerate(body["text_offset"]):
        # Up to here: less the characters that are not complete yet.
        before = b"".join(map(tokenizer.token_bytes, ids[:index]))
        assert text[:offset] == before.decode(errors="ignore")
    assert body["text_offset"][-1] == len(text)
    assert body["tokens"][-1] == EOS


def test_offsets_fit_the_text_of_any_tokens(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(300) for _ in range(rng.randrange(1, 30))]
        body = chunks(CompletionLogprobs(tokenizer.token_bytes, 0), ids, rng.randrange(1, 9))
        # With one more token, all the text before it is certain.
        ids = [*ids, *tokenizer.encode("x")]
        offsets = chunks(CompletionLogprobs(tokenizer.token_bytes, 0), ids, 50)["text_offset"]
        assert offsets[:-1] == body["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(tokenizer.decode(ids)) - 1


def test_the_emitted_token_is_among_the_top(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("!")
    at = TokenLogprobs(logprob=-5.0, rank=9, top=((60, -0.5), (61, -1.5), (62, -2.5)))
    text = tokenizer.token_bytes.text
    body = CompletionLogprobs(tokenizer.token_bytes, 2).output([token], [at])
    assert body["top_logprobs"] == [{text(60): -0.5, text(61): -1.5, "!": -5.0}]
    at = TokenLogprobs(logprob=-0.5, rank=1, top=((token, -0.5),))
    body = CompletionLogprobs(tokenizer.token_bytes, 1).output([token], [at])
    assert body["top_logprobs"] == [{"!": -0.5}]


def test_the_more_probable_of_two_equal_texts_is_kept(tokenizer: Tokenizer) -> None:
    at = TokenLogprobs(logprob=-5.0, rank=3, top=((298, -0.5), (299, -1.5)))
    body = CompletionLogprobs(tokenizer.token_bytes, 2).output([297], [at])
    assert body["top_logprobs"] == [{"": -0.5}]


def test_an_echoed_prompt_comes_first(tokenizer: Tokenizer) -> None:
    text = "a 日 <|im_start|>b"
    ids = tokenizer.encode(text)
    entries = [None, *(logprobs_of(token, 3) for token in ids[1:])]
    # As if the tokenizer had put a special token in front.
    for front in ([], tokenizer.encode(EOS)):
        logprobs = CompletionLogprobs(tokenizer.token_bytes, 2)
        front_entries = [logprobs_of(token, 3) for token in front]
        body = logprobs.prompt([*front, *ids], [*front_entries, *entries], text)
        assert body["text_offset"][: len(front)] == [0] * len(front)
        found = {name: values[len(front) :] for name, values in body.items()}
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert found["token_logprobs"][1] == -ids[1] / 8
        assert len(found["top_logprobs"][1]) == 3
        (mark,) = [i for i, token in enumerate(found["tokens"]) if token == "<|im_start|>"]
        assert found["text_offset"][mark : mark + 2] == [4, 4 + len("<|im_start|>")]
        assert logprobs.output([70], [logprobs_of(70, 2)])["text_offset"] == [len(text)]


def test_a_prompts_by_id(tokenizer: Tokenizer) -> None:
    at = TokenLogprobs(logprob=-5.0, rank=9, top=((61, -0.5), (62, -1.5), (63, -2.5)))
    text = tokenizer.token_bytes.text
    assert prompt_logprobs(tokenizer.token_bytes, [70, 71], [None, at], 2) == [
        None,
        {
            "71": {"logprob": -5.0, "rank": 9, "decoded_token": text(71)},
            "61": {"logprob": -0.5, "rank": 1, "decoded_token": text(61)},
            "62": {"logprob": -1.5, "rank": 2, "decoded_token": text(62)},
        },
    ]


def test_there_is_no_infinity(tokenizer: Tokenizer) -> None:
    at = TokenLogprobs(logprob=float("-inf"), rank=9)
    tokens = tokenizer.token_bytes
    assert chat_logprobs(tokens, [70], [at])["content"][0]["logprob"] == -9999.0
    assert CompletionLogprobs(tokens, 0).output([70], [at])["token_logprobs"] == [-9999.0]
    (found,) = prompt_logprobs(tokens, [70], [at], 0)
    assert found["70"]["logprob"] == -9999.0
