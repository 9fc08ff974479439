"""The choices of an answer in OpenAI's shape, in one piece or as the chunks of a stream."""

from dataclasses import dataclass
from typing import Any

from app.generation import Delta, Finish
from app.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from app.token_bytes import TokenBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What an answer tells beside its text; the numbers are of alternatives per token.

    `echo` is the text of the prompt where the output's text begins with it.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    echo: str | None = None


class ChatChoice:
    """One choice of a chat."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, index: int, prompt: tuple[int, ...], report: Report, tokens: TokenBytes
    ) -> None:
        self._index = index
        self._prompt = prompt
        self._report = report
        self._tokens = tokens

    def about_prompt(self, delta: Delta | None = None) -> dict[str, Any]:
        """What stands beside the choices, in a stream beside the first ones only."""
        return _about_prompt(self._prompt, delta, self._report, self._tokens)

    def whole(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice({"message": message}, delta, delta.finish)

    def opening(self) -> dict[str, Any] | None:
        """Who speaks."""
        return _choice(self._index, {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """None where there is nothing to tell yet."""
        if not delta.text and not _tells_tokens(delta, self._report):
            return None
        return self._choice({"delta": {"content": delta.text}}, delta, None)

    def closing(self, finish: Finish) -> dict[str, Any]:
        return _choice(self._index, {"delta": {}}, finish=finish)

    def _choice(
        self, content: dict[str, Any], delta: Delta, finish: Finish | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._report.logprobs is not None:
            logprobs = chat_logprobs(self._tokens, delta.token_ids, delta.logprobs)
        content = content | _token_ids(delta, self._report)
        return _choice(self._index, content, logprobs=logprobs, finish=finish)


class CompletionChoice:
    """One choice of a completion."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, index: int, prompt: tuple[int, ...], report: Report, tokens: TokenBytes
    ) -> None:
        self._index = index
        self._prompt = prompt
        self._report = report
        self._tokens = tokens
        self._begun = False
        self._logprobs = (
            None if report.logprobs is None else CompletionLogprobs(tokens, report.logprobs)
        )

    def about_prompt(self, delta: Delta | None = None) -> dict[str, Any]:
        """Nothing: each choice tells of its own prompt."""
        return {}

    def whole(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, delta.finish)

    def opening(self) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """None where there is nothing to tell yet."""
        echoes = self._report.echo is not None and not self._begun
        if not echoes and not delta.text and not _tells_tokens(delta, self._report):
            return None
        return self._choice(delta, None)

    def closing(self, finish: Finish) -> dict[str, Any]:
        return _choice(self._index, {"text": ""}, finish=finish)

    def _choice(self, delta: Delta, finish: Finish | None) -> dict[str, Any]:
        content: dict[str, Any] = {"text": delta.text, **_token_ids(delta, self._report)}
        logprobs = None
        if not self._begun:
            content |= _about_prompt(self._prompt, delta, self._report, self._tokens)
            if self._report.echo is not None:
                content["text"] = self._report.echo + delta.text
                if self._logprobs is not None:
                    logprobs = self._logprobs.prompt(
                        self._prompt, delta.prompt_logprobs, self._report.echo
                    )
        if self._logprobs is not None:
            output = self._logprobs.output(delta.token_ids, delta.logprobs)
            logprobs = {k: (logprobs[k] if logprobs else []) + output[k] for k in output}
        self._begun = True
        return _choice(self._index, content, logprobs=logprobs, finish=finish)


def _choice(
    index: int,
    content: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish: Finish | None = None,
) -> dict[str, Any]:
    reason = finish.reason if finish is not None else None
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _tells_tokens(delta: Delta, report: Report) -> bool:
    return bool(delta.token_ids) and (report.token_ids or report.logprobs is not None)


def _token_ids(delta: Delta, report: Report) -> dict[str, Any]:
    return {"token_ids": list(delta.token_ids)} if report.token_ids else {}


def _about_prompt(
    prompt: tuple[int, ...], delta: Delta | None, report: Report, tokens: TokenBytes
) -> dict[str, Any]:
    """The prompt's ids and log-probabilities; without a delta these are not known yet."""
    about: dict[str, Any] = {}
    if report.token_ids:
        about["prompt_token_ids"] = list(prompt)
    if report.prompt_logprobs is not None and delta is not None:
        about["prompt_logprobs"] = prompt_logprobs(
            tokens, prompt, delta.prompt_logprobs, report.prompt_logprobs
        )
    return about
