"""What each token stands for by itself, which may be a part of a character."""

import re
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }


_BYTE_LEVEL = _byte_level_alphabet()


class TokenBytes:
    """The bytes of the tokens of a Hugging Face tokenizer, byte-level or SentencePiece."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        added = hf_tokenizer.added_tokens_decoder
        self._added: dict[int, bytes] = {i: token.content.encode() for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        self._byte_level = backend is not None and "ByteLevel" in str(backend.decoder)

    def __call__(self, token_id: int) -> bytes:
        """Empty for ids that the vocabulary of the model has beyond the tokenizer's."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token: str | None = self._hf.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._byte_level and all(c in _BYTE_LEVEL for c in token):
            return bytes(_BYTE_LEVEL[c] for c in token)
        byte = _BYTE_FALLBACK.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def text(self, token_id: int) -> str:
        r"""Its text; bytes that are only a part of a character are written as `\xe6`."""
        return self(token_id).decode(errors="backslashreplace")

    def is_special(self, token_id: int) -> bool:
        """Whether it has no place in decoded text."""
        return token_id in self._special
