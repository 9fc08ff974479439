"""Text in, text out: what HTTP and gRPC share. Knows nothing of either, nor of Ray."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from actors.config import EngineConfig
from actors.errors import EngineDead, RequestRejected
from actors.limits import check_prompt, check_token_ids
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from app.generation import Chat, Delta, Finish, Generation, GenerationInput, Usage
from app.stop_strings import StopStrings
from app.tokenizer import IncrementalDetokenizer, Tokenizer

# Closing the stream tells the engine to drop the request.
Engine = Callable[[GenerateRequest], AsyncGenerator[TokenChunk, None]]

# Enough for any tokenizer to see that a text continues another.
_CONTEXT_TOKENS = 5


class ModelNotFound(RequestRejected):
    """The request names a model that is not served here."""


class Service:
    """Checks and tokenises requests for one engine, and makes text of what it emits."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, engine: Engine) -> None:
        self.model_name = config.served_model_name
        self.max_model_len = config.max_model_len
        self._config = config
        self._speculative = config.drafter is not None
        self._tokenizer = tokenizer
        self._engine = engine

    def check_model(self, name: str) -> None:
        """Raises `ModelNotFound` where `name` is not the model served here."""
        if name != self.model_name:
            raise ModelNotFound(
                f"model {name!r} does not exist; served: {self.model_name}", "model"
            )

    async def start(self, wanted: GenerationInput) -> Generation:
        """Tokenise and check a request.

        Raises `RequestRejected` naming the field that can't be served, `PromptTooLong`.
        """
        check_token_ids(self._config, wanted.stop_token_ids, "stop_token_ids")
        prompt = await self._encode(wanted.prompt)
        request = GenerateRequest(
            request_id=wanted.request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=self._max_tokens(len(prompt), wanted),
                seed=wanted.seed,
                stop_token_ids=wanted.stop_token_ids,
                ignore_eos=wanted.ignore_eos,
            ),
        )
        # A chat answer begins a text, a completion continues its prompt.
        context = () if isinstance(wanted.prompt, Chat) else prompt[-_CONTEXT_TOKENS:]
        detokenizer = IncrementalDetokenizer(self._tokenizer.decode, context)
        output = _Output(len(prompt), detokenizer, StopStrings(wanted.stop), self._speculative)
        return Generation(request_id=wanted.request_id, deltas=self._run(request, output))

    async def _encode(self, prompt: str | tuple[int, ...] | Chat) -> tuple[int, ...]:
        """Long texts take long, so not on the event loop."""
        field = "messages" if isinstance(prompt, Chat) else "prompt"
        if isinstance(prompt, Chat):
            ids = tuple(await asyncio.to_thread(self._tokenizer.encode_chat, prompt.messages))
        elif isinstance(prompt, str):
            ids = tuple(await asyncio.to_thread(self._tokenizer.encode, prompt))
        else:
            ids = prompt
        check_prompt(self._config, ids, field)
        return ids

    def _max_tokens(self, prompt_tokens: int, wanted: GenerationInput) -> int:
        room = self.max_model_len - prompt_tokens
        if wanted.max_tokens is None:
            return min(wanted.default_max_tokens or room, room)
        if not 1 <= wanted.max_tokens <= room:
            name = wanted.max_tokens_param
            raise RequestRejected(
                f"{name} is {wanted.max_tokens}, it must be from 1 to {room} (prompt has "
                f"{prompt_tokens} tokens, max_model_len is {self.max_model_len})",
                name,
            )
        return wanted.max_tokens

    async def _run(
        self, request: GenerateRequest, output: "_Output"
    ) -> AsyncGenerator[Delta, None]:
        stream = self._engine(request)
        try:
            async for chunk in stream:
                delta = output.push(chunk)
                if delta.token_ids or delta.finish:
                    yield delta
                if delta.finish:
                    return
            raise EngineDead("the engine's stream ended before the request did")
        finally:
            await stream.aclose()


class _Output:
    """The output of one request so far: which tokens arrived, and their text."""

    def __init__(
        self,
        prompt_tokens: int,
        detokenizer: IncrementalDetokenizer,
        stop_strings: StopStrings,
        speculative: bool,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._num_tokens = 0
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._speculative = speculative

    def push(self, chunk: TokenChunk) -> Delta:
        """Raises `EngineDead` where the engine gave the request up."""
        if chunk.finish_reason == "abort":
            raise EngineDead("the engine gave the request up")
        assert chunk.first_index <= self._num_tokens, "the engine left out tokens"
        fresh = chunk.token_ids[self._num_tokens - chunk.first_index :]
        # The token that ended the request is counted, but is no part of the text.
        visible = fresh[:-1] if chunk.finish_reason == "stop" else fresh
        text, stopped_by = self._read(visible, len(fresh), last=chunk.finish_reason is not None)
        reason = chunk.finish_reason
        speculation = chunk.speculation if self._speculative else None
        if stopped_by is not None:
            reason = "stop"
            # The engine can't know of it, so its counters are cut here with the tokens.
            speculation = speculation and speculation.without(len(fresh) - stopped_by)
            fresh = fresh[:stopped_by]
        self._num_tokens += len(fresh)
        if reason is None:
            return Delta(text=text, token_ids=fresh)
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._num_tokens,
            speculation=speculation,
        )
        return Delta(text=text, token_ids=fresh, finish=Finish(reason=reason, usage=usage))

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
            passed, stopped = self._stop_strings.push(self._detokenizer.push(group))
            text += passed
            if stopped:
                return text, num_read
        if last:
            passed, stopped = self._stop_strings.push(self._detokenizer.flush())
            text += passed
            if stopped:
                # Only the end of the output showed it, so no token came behind it.
                return text, num_fresh
            text += self._stop_strings.flush()
        return text, None
