"""Text in, text out: what HTTP and gRPC share. Knows nothing of either, nor of Ray."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable

from actors.config import EngineConfig
from actors.errors import EngineDead, RequestRejected
from actors.limits import check_prompt, check_sampling, check_scheduling
from actors.messages import GenerateRequest, TokenChunk
from app.generation import Chat, Delta, Generation, GenerationInput, Prompt
from app.merge import merge
from app.output import Output
from app.tokenizer import IncrementalDetokenizer, Tokenizer

# Closing the stream tells the engine to drop the request.
Engine = Callable[[GenerateRequest], AsyncGenerator[TokenChunk, None]]

# Enough for any tokenizer to see that a text continues another.
_CONTEXT_TOKENS = 5
_SEED_BITS = 63


class ModelNotFound(RequestRejected):
    """The request names a model that is not served here."""


class Service:
    """Checks and tokenises requests for one engine, and makes text of what it emits."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, engine: Engine) -> None:
        self.model_name = config.served_model_name
        self.max_model_len = config.max_model_len
        self.speculative = config.drafter is not None
        self.tokenizer = tokenizer
        self._config = config
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
        check_scheduling(self._config, wanted.priority, wanted.max_draft_tokens)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if wanted.bad_words:
            bad_words = await asyncio.to_thread(self._banned, wanted.bad_words)
        prompts: list[tuple[int, ...]] = []
        streams: list[AsyncGenerator[Delta, None]] = []
        for prompt in wanted.prompts:
            token_ids = await self._encode(prompt)
            prompts.append(token_ids)
            # A chat answer begins a text, a completion continues its prompt.
            context = () if isinstance(prompt, Chat) else token_ids[-_CONTEXT_TOKENS:]
            max_tokens = self._max_tokens(len(token_ids), wanted)
            seed = secrets.randbits(_SEED_BITS) if wanted.seed is None else wanted.seed
            for choice in range(wanted.num_choices):
                sampling = wanted.sampling(
                    max_tokens=max_tokens, seed=seed, choice=choice, bad_words=bad_words
                )
                if choice == 0:
                    check_sampling(self._config, sampling)
                request = GenerateRequest(
                    request_id=f"{wanted.request_id}-{len(streams)}",
                    prompt_token_ids=token_ids,
                    sampling=sampling,
                    priority=wanted.priority,
                    cache_salt=wanted.cache_salt,
                    max_draft_tokens=wanted.max_draft_tokens,
                )
                detokenizer = IncrementalDetokenizer(self.tokenizer.decode, context)
                output = Output(request, detokenizer, wanted.stop, speculative=self.speculative)
                streams.append(self._run(request, output))
        return Generation(
            request_id=wanted.request_id,
            prompts=tuple(prompts),
            num_choices=wanted.num_choices,
            deltas=merge(streams),
        )

    def _banned(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ids) for word in words for ids in self.tokenizer.encode_banned(word))

    async def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Long texts take long, so not on the event loop."""
        field = "messages" if isinstance(prompt, Chat) else "prompt"
        if isinstance(prompt, Chat):
            ids = tuple(await asyncio.to_thread(self.tokenizer.encode_chat, prompt.messages))
        elif isinstance(prompt, str):
            ids = tuple(await asyncio.to_thread(self.tokenizer.encode, prompt))
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

    async def _run(self, request: GenerateRequest, output: Output) -> AsyncGenerator[Delta, None]:
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
