"""Loads in this process: the engine alone, without Ray, HTTP or text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.engine_args import EngineArgs
from actors.llm import LLM, RequestOutput
from actors.messages import SamplingParams
from actors.trace import Trace
from benchmarks.load import Mode, Sample, Source
from models.config import load_drafter_config
from models.hub import resolve


class EngineLoad:
    """One engine in one mode. Prompts are tokenised before the clock starts."""

    source: Source = "engine"

    def __init__(self, mode: Mode, llm: LLM, trace: Trace | None = None) -> None:
        """`trace` is the one that `llm` writes to, if it does.

        `idle_gaps_s` then has, by concurrency, the device's idle times between steps, warm-up
        included.
        """
        self.mode: Mode = mode
        self.idle_gaps_s: dict[int, list[float]] = {}
        self._llm = llm
        self._trace = trace
        self._num_gaps = 0

    def run(
        self,
        texts: Sequence[str],
        max_tokens: int,
        concurrency: int,
        on_finish: Callable[[], None],
    ) -> tuple[Sample, ...]:
        """See `Load.run`. Raises `RequestRejected` for a prompt that can't be served."""
        prompts = [self._llm.encode_chat([{"role": "user", "content": text}]) for text in texts]
        outputs = self._llm.generate(
            prompts,
            SamplingParams(max_tokens=max_tokens),
            on_finish=on_finish,
            max_in_flight=concurrency,
        )
        if self._trace is not None:
            gaps_s = self._trace.idle_gaps_s()
            # The first new one is the pause between two runs.
            self.idle_gaps_s.setdefault(concurrency, []).extend(gaps_s[self._num_gaps + 1 :])
            self._num_gaps = len(gaps_s)
        return tuple(_sample(output) for output in outputs)


def engine_args(mode: Mode, model: str, drafter: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`LLM`'s arguments for `mode`; `fields` are those of `EngineArgs` that all modes share.

    Raises `CheckpointNotFound` or `CheckpointRefused` for the drafter.
    """
    speculative_config, verify_width = None, 1
    if mode == "dflash":
        speculative_config = {"method": "dflash", "model": drafter}
        verify_width = load_drafter_config(resolve(drafter)).block_size
    default: int = EngineArgs.model_fields["max_num_batched_tokens"].default
    return {
        "model": model,
        "speculative_config": speculative_config,
        "max_num_batched_tokens": max(default, fields["max_num_seqs"] * verify_width),
        # Prompts repeat from round to round.
        "enable_prefix_caching": False,
        **fields,
    }


def _sample(output: RequestOutput) -> Sample:
    return Sample(
        submitted_at=output.timing.submitted_at,
        first_token_at=output.timing.first_token_at,
        finished_at=output.timing.finished_at,
        num_tokens=len(output.token_ids),
        verify_steps=output.speculation.verify_steps,
        emitted_tokens=output.speculation.emitted_tokens,
    )
