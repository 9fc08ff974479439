"""`LLM`: the whole engine in this process, without Ray, for scripts, tests and benchmarks."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.config import EngineConfig
from actors.engine import Engine
from actors.errors import ConfigError, EngineDead
from actors.messages import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    SpeculationStats,
    TokenChunk,
    TokenLogprobs,
)
from actors.scheduler import LeaveOut
from actors.shard import Shard
from actors.stats import EngineStats
from actors.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTiming:
    """When the engine got a request, gave its first token and its last: `perf_counter` seconds."""

    submitted_at: float
    first_token_at: float
    finished_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """One finished generation. A token that ended it is the last of `token_ids`. `cached_tokens` of
    the prompt came from the prefix cache.

    `logprobs` has one entry per token, `prompt_logprobs` one per token of the prompt, None for the
    first, where they were asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    cached_tokens: int
    speculation: SpeculationStats
    timing: RequestTiming
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class LLM:
    """One engine on one rank.

    >>> with LLM("smollm2-135m-instruct", speculative_config={
    ...     "method": "dflash", "model": "smollm2-135m-instruct-dflash"}) as llm:
    ...     print(llm.generate(["The sky is"], SamplingParams(max_tokens=16))[0].text)
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: dict[str, Any] | None = None,
        trace: Trace | None = None,
        leave_out: LeaveOut | None = None,
        **engine_args: Any,
    ) -> None:
        """`engine_args` are the other fields of `actors.engine_args.EngineArgs`.

        `trace` gets what host and device do; `leave_out` is for tests, see `Scheduler`. Raises
        `ConfigError`.
        """
        args = {"model": model, "speculative_config": speculative_config, **engine_args}
        self.config = EngineConfig.resolve(args)
        if self.config.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.config.tensor_parallel_size}; LLM runs one rank "
                "in one process, use `serve run` for more"
            )
        if self.config.is_dedicated:
            raise ConfigError(
                "speculative_config.placement is dedicated; LLM runs one rank in one process, use "
                "`serve run` for more"
            )
        if self.config.neuron_cores_per_shard is not None:
            raise ConfigError(
                f"neuron_cores_per_shard is {self.config.neuron_cores_per_shard}; LLM reserves no "
                "NeuronCores, use `serve run`"
            )
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._batch = _Batch()
        self._shard = Shard(self.config, rank=0, trace=trace)
        self._shard.load()
        self._engine = Engine(
            self.config, self._shard, self._collect, leave_out=leave_out, trace=trace
        )

    @property
    def stats(self) -> EngineStats:
        """Counters over everything this engine generated."""
        return self._engine.scheduler.stats

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(
                self.config.target_path, local_files_only=True, trust_remote_code=False
            )
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(max_tokens=16),
        on_finish: Callable[[], None] | None = None,
        max_in_flight: int | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, text or token ids. A text is one prompt.

        One `sampling` serves all prompts, a sequence has one for each. The engine gets all of them
        at once or, with `max_in_flight`, so many, and the next as each ends. Outputs come in the
        order of the prompts; `on_finish` is called as each ends, for a progress bar. Raises
        `RequestRejected` for a prompt that can't be served, before any is, and `ValueError` for
        `max_in_flight` below 1.
        """
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}, at least 1 is needed")
        if isinstance(prompts, str):
            prompts = [prompts]
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        requests = [
            GenerateRequest(
                request_id=uuid4().hex, prompt_token_ids=self._token_ids(prompt), sampling=params
            )
            for prompt, params in zip(prompts, each, strict=True)
        ]
        num_first = len(requests) if max_in_flight is None else max_in_flight
        first, held_back = requests[:num_first], requests[num_first:]
        for request in held_back:
            self._engine.check(request)
        self._batch = _Batch(held_back=deque(held_back), on_finish=on_finish or _ignore)
        for request in first:
            self._batch.submitted(request)
        self._engine.add_all(first)
        try:
            while self._engine.step():
                pass
        except EngineDead:
            raise
        except BaseException:
            # Interrupted: the next call must find neither these requests nor their last step.
            self._engine.abandon()
            raise
        return [self._output(request) for request in requests]

    def chat(
        self,
        conversations: Sequence[Sequence[dict[str, str]]],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(max_tokens=16),
    ) -> list[RequestOutput]:
        """`generate` for lists of `{"role", "content"}` messages, through the chat template."""
        return self.generate([self.encode_chat(each) for each in conversations], sampling)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The token ids of a conversation with its generation prompt."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return ids

    def next_token_logits(self, token_ids: list[int]) -> torch.Tensor:
        """The target's float32 logits `[vocab]` behind `token_ids`, apart from the engine."""
        return self._shard.next_token_logits(token_ids)

    def warm_up(self) -> None:
        """Compile everything now, with a progress bar on stderr, rather than at first use.

        Afterwards nothing is compiled any more (`late_compile` says what happens otherwise).
        Raises `EngineDead`.
        """
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("compiling", total=None)
            self._engine.warm_up(lambda done, total: bar.update(task, completed=done, total=total))

    def close(self) -> None:
        """End the device thread, and what the engine started."""
        self._engine.close()
        self._shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _token_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return tuple(int(token) for token in ids)

    def _collect(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self._batch.runs[chunk.request_id].append(chunk)
            if chunk.finish_reason is None:
                continue
            self._batch.on_finish()
            if self._batch.held_back:
                request = self._batch.held_back.popleft()
                self._batch.submitted(request)
                self._engine.add(request)

    def _output(self, request: GenerateRequest) -> RequestOutput:
        run = self._batch.runs[request.request_id]
        token_ids = tuple(token for chunk in run.chunks for token in chunk.token_ids)
        last = run.chunks[-1]
        assert last.finish_reason is not None
        return RequestOutput(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason=last.finish_reason,
            cached_tokens=run.chunks[0].cached_tokens,
            speculation=last.speculation,
            timing=RequestTiming(
                submitted_at=run.submitted_at,
                first_token_at=run.chunk_times[0],
                finished_at=run.chunk_times[-1],
            ),
            logprobs=tuple(entry for chunk in run.chunks for entry in chunk.logprobs),
            prompt_logprobs=run.chunks[0].prompt_logprobs,
        )


def _ignore() -> None:
    return None


@dataclass(slots=True)
class _Run:
    """What one request has emitted, each chunk with its arrival."""

    submitted_at: float
    chunks: list[TokenChunk] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)

    def append(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        self.chunk_times.append(time.perf_counter())


@dataclass(slots=True)
class _Batch:
    """The requests of one `generate` call: those the engine has not got yet, and the others."""

    held_back: deque[GenerateRequest] = field(default_factory=deque)
    on_finish: Callable[[], None] = _ignore
    runs: dict[str, _Run] = field(default_factory=dict)

    def submitted(self, request: GenerateRequest) -> None:
        self.runs[request.request_id] = _Run(time.perf_counter())
