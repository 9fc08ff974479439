"""The output of one choice: which of the engine's tokens arrived, their text, and its end."""

from collections.abc import Sequence

from actors.errors import EngineDead
from actors.messages import GenerateRequest, TokenChunk
from app.generation import Delta, Finish, Usage
from app.stop_strings import StopStrings
from app.tokenizer import IncrementalDetokenizer


class Output:
    """Turns the chunks of `request` into deltas, cut where a stop string is completed.

    `speculative` tells whether the engine has a drafter.
    """

    def __init__(
        self,
        request: GenerateRequest,
        detokenizer: IncrementalDetokenizer,
        stop: Sequence[str],
        *,
        speculative: bool,
    ) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop)
        self._speculative = speculative
        self._num_tokens = 0
        self._first_chunk: TokenChunk | None = None

    def push(self, chunk: TokenChunk) -> Delta:
        """Raises `EngineDead` where the engine gave the request up."""
        if chunk.finish_reason == "abort":
            raise EngineDead("the engine gave the request up")
        assert chunk.first_index <= self._num_tokens, "the engine left out tokens"
        if self._first_chunk is None:
            self._first_chunk = chunk
        known = self._num_tokens - chunk.first_index
        fresh, logprobs = chunk.token_ids[known:], chunk.logprobs[known:]
        if self._request.sampling.logprobs is not None:
            assert len(logprobs) == len(fresh), "the engine left out log-probabilities"
        prompt_logprobs = self._first_chunk.prompt_logprobs if self._num_tokens == 0 else ()
        if self._request.sampling.prompt_logprobs is not None:
            found = len(self._first_chunk.prompt_logprobs)
            assert found == len(self._request.prompt_token_ids), "the engine left out the prompt's"
        # The token that ended the request is counted, but is no part of the text.
        visible = fresh[:-1] if chunk.finish_reason == "stop" else fresh
        text, stopped_by = self._read(visible, len(fresh), last=chunk.finish_reason is not None)
        reason, end = chunk.finish_reason, len(chunk.token_ids)
        if stopped_by is not None:
            # The engine can't know of it, so its counters are cut here with the tokens.
            reason, end = "stop", known + stopped_by
            fresh, logprobs = fresh[:stopped_by], logprobs[:stopped_by]
        self._num_tokens += len(fresh)
        finish = None
        if reason is not None:
            usage = Usage(
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=self._num_tokens,
                cached_tokens=self._first_chunk.cached_tokens,
                speculation=chunk.speculation_at(end) if self._speculative else None,
            )
            finish = Finish(reason=reason, usage=usage)
        return Delta(
            text=text,
            token_ids=fresh,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
        )

    def _read(
        self, token_ids: Sequence[int], num_fresh: int, *, last: bool
    ) -> tuple[str, int | None]:
        """The new text, and how many tokens it took to complete a stop string, if any did.

        `token_ids` are those of the chunk's `num_fresh` new tokens that show in the text.
        """
        # One by one only where it matters which token completed a stop string.
        groups = [(token,) for token in token_ids] if self._stop_strings else [token_ids]
        text = ""
        for num_read, group in enumerate(groups, start=1):
            passed, stopped = self._find(self._detokenizer.push(group), num_read)
            text += passed
            if stopped:
                return text, num_read
        if last:
            passed, stopped = self._find(self._detokenizer.flush(), num_fresh)
            text += passed
            if stopped:
                # Only the end of the output showed it, so no token came behind it.
                return text, num_fresh
            text += self._stop_strings.flush()
        return text, None

    def _find(self, text: str, num_read: int) -> tuple[str, bool]:
        """`min_tokens` holds stop strings back as it does stop ids."""
        armed = self._num_tokens + num_read > self._request.sampling.min_tokens
        return self._stop_strings.push(text, armed=armed)
