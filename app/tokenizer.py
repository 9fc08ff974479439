"""A checkpoint's tokenizer: text and messages to ids, ids to text as they arrive."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.errors import ConfigError, RequestRejected
from app.token_bytes import TokenBytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A Hugging Face tokenizer, narrowed to what serving needs. Safe to use from threads."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.token_bytes = TokenBytes(hf_tokenizer)
        # A tokenizer saved with truncation on drops it in its first call, which would be a race.
        self.encode("")

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read the tokenizer of the checkpoint in `directory`; nothing is downloaded.

        Raises `ConfigError` where there is none that loads.
        """
        # Takes seconds, which only a process that serves should pay.
        from transformers import AutoTokenizer

        try:
            return cls(
                AutoTokenizer.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
            )
        except Exception as error:  # whatever the files hold, there is no tokenizer
            raise ConfigError(f"{directory}: the tokenizer can't be loaded ({error})") from error

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """The ids of a raw prompt, with the special tokens that the tokenizer itself adds."""
        ids: list[int] = self._hf.encode(text)
        return ids

    def encode_banned(self, word: str) -> list[list[int]]:
        """The ids of `word` wherever it may stand in a text.

        They may differ behind a space (vLLM's rule: an own form is one of as many tokens that
        begins with another).
        """
        word = word.lstrip()
        alone: list[int] = self._hf.encode(word, add_special_tokens=False)
        spaced: list[int] = self._hf.encode(f" {word}", add_special_tokens=False)
        differs = len(spaced) == len(alone) and spaced[:1] != alone[:1]
        return [alone, spaced] if differs else [alone]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of `messages` in the checkpoint's chat template, up to the assistant's turn.

        Raises `RequestRejected` where there is no template, or it does not take the messages.
        """
        if not self.has_chat_template:
            raise RequestRejected(
                "this model has no chat template; use /v1/completions", "messages"
            )
        try:
            ids: list[int] = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # templates are programs that raise what they like
            raise RequestRejected(
                f"the chat template does not take these messages: {error}", "messages"
            ) from None
        return ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `token_ids`; special tokens have none, unless `special`."""
        text: str = self._hf.decode(
            list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text


class IncrementalDetokenizer:
    """Turns ids that arrive bit by bit into text that only ever grows by whole characters.

    Joined, everything that `push` and `flush` return is the decoded whole. `context` are ids that
    stand before the first one: some tokenizers drop the space in front of a text's first word,
    which is wrong where the text continues another.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        # Ids whose text is out, kept because they shape the text of the ids behind them.
        self._shown = list(context)
        self._held: list[int] = []
        if self._decode(self._shown).endswith(REPLACEMENT):
            self._shown.clear()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before; empty while a character is open."""
        if not token_ids:
            return ""
        self._held += token_ids
        text = self._text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._shown, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The rest, after the last id. A character that was never completed is U+FFFD."""
        text = self._text() if self._held else ""
        self._shown, self._held = self._held, []
        return text

    def _text(self) -> str:
        """What the held ids add to the text of the shown ones."""
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]
