"""Log-probabilities in the shapes of OpenAI's two endpoints, and in vLLM's for a prompt."""

import codecs
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from actors.messages import TokenLogprobs
from app.token_bytes import TokenBytes

# OpenAI's word for "very unlikely"; JSON has no infinity.
_LOWEST = -9999.0


def chat_logprobs(
    tokens: TokenBytes, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """`logprobs` of a chat's choice; the bytes of all tokens join to the text."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokens.text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokens(token_id)),
        }

    content = [
        entry(token_id, at.logprob) | {"top_logprobs": [entry(*each) for each in at.top]}
        for token_id, at in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokens: TokenBytes,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
) -> list[dict[str, Any] | None]:
    """vLLM's: for each token of the prompt a map by id, null for the first token."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokens.text(token_id)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    def at_position(token_id: int, at: TokenLogprobs) -> dict[str, Any]:
        found = {str(token_id): entry(token_id, at.logprob, at.rank)}
        for rank, (other, logprob) in enumerate(at.top[:num_top], start=1):
            found.setdefault(str(other), entry(other, logprob, rank))
        return found

    return [
        None if at is None else at_position(token_id, at)
        for token_id, at in zip(token_ids, logprobs, strict=True)
    ]


class CompletionLogprobs:
    """`logprobs` of a completion's choice, bit by bit. `text_offset` counts characters.

    A token that begins within a character has the offset of that character, and a stop string's
    tokens have offsets behind the end of the text.
    """

    def __init__(self, tokens: TokenBytes, num_top: int) -> None:
        self._tokens = tokens
        self._num_top = num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text: str
    ) -> dict[str, list[Any]]:
        """Those of a prompt that is echoed as `text`, which the output continues."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        lengths = [len(decoder.decode(self._tokens(token_id))) for token_id in token_ids]
        # Aligned at the end: the tokenizer may have put tokens in front that are not in the text.
        ends = accumulate(lengths)
        self._offset = len(text)
        missing = len(text) - sum(lengths)
        offsets = [max(0, missing + end - n) for end, n in zip(ends, lengths, strict=True)]
        return self._body(token_ids, logprobs, offsets)

    def output(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, list[Any]]:
        """Those of the next tokens of the output."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if not self._tokens.is_special(token_id):
                self._offset += len(self._decoder.decode(self._tokens(token_id)))
        return self._body(token_ids, logprobs, offsets)

    def _body(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: list[int],
    ) -> dict[str, list[Any]]:
        paired = list(zip(token_ids, logprobs, strict=True))
        return {
            "tokens": [self._tokens.text(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(at.logprob) if at else None for at in logprobs],
            "top_logprobs": [self._top(token_id, at) if at else None for token_id, at in paired],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, at: TokenLogprobs) -> dict[str, float]:
        """By text; where two tokens have the same, the more probable one has the place."""
        found: dict[str, float] = {}
        for other, logprob in (*at.top[: self._num_top], (token_id, at.logprob)):
            found.setdefault(self._tokens.text(other), _finite(logprob))
        return found


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
