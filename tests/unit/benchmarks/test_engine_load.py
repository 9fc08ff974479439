"""Loads on a tiny engine in this process."""

from pathlib import Path
from typing import Any

import pytest

from actors.llm import LLM
from benchmarks.engine_load import EngineLoad, engine_args


def fields(pair: tuple[Path, Path], **others: Any) -> dict[str, Any]:
    return {
        "model": str(pair[0]),
        "drafter": str(pair[1]),
        "fields": {"backend": "eager", **others},
    }


def test_only_dflash_has_a_drafter(pair: tuple[Path, Path]) -> None:
    off = engine_args("off", **fields(pair, max_num_seqs=4, exact=True))
    assert off["speculative_config"] is None
    assert off["exact"] is True
    on = engine_args("dflash", **fields(pair, max_num_seqs=4, exact=True))
    assert on["speculative_config"] == {"method": "dflash", "model": str(pair[1])}
    differ = {name for name in off if off[name] != on[name]}
    assert differ == {"speculative_config"}


def test_the_token_budget_has_room_for_every_block(pair: tuple[Path, Path]) -> None:
    """Blocks of five tokens; the default budget is 512."""
    budget = "max_num_batched_tokens"
    assert engine_args("dflash", **fields(pair, max_num_seqs=102))[budget] == 512
    assert engine_args("dflash", **fields(pair, max_num_seqs=103))[budget] == 515
    assert engine_args("off", **fields(pair, max_num_seqs=600))[budget] == 600


class Gaps:
    """A trace whose gaps after each run were given before."""

    def __init__(self, *after_runs: list[float]) -> None:
        self._after_runs = iter(after_runs)

    def idle_gaps_s(self) -> list[float]:
        return next(self._after_runs)


def test_runs_of_a_tiny_pair(pair: tuple[Path, Path]) -> None:
    args = engine_args("dflash", **fields(pair, max_num_seqs=2, threads_per_shard=1))
    finished: list[None] = []
    trace = Gaps([0.1, 0.2], [0.1, 0.2, 9.0, 0.3], [0.1, 0.2, 9.0, 0.3, 9.0, 0.4, 0.5])
    with LLM(**args) as llm:
        load = EngineLoad("dflash", llm, trace)
        alone = load.run(["one", "two", "three"], 6, 1, lambda: finished.append(None))
        together = load.run(["one", "two", "three"], 6, 2, lambda: finished.append(None))
        load.run(["one"], 1, 2, lambda: finished.append(None))
    assert len(finished) == 7
    assert [sample.num_tokens for sample in alone] == [6, 6, 6]
    for sample in (*alone, *together):
        assert sample.submitted_at < sample.first_token_at < sample.finished_at
        assert sample.emitted_tokens == sample.num_tokens - 1  # the first came from prefill
        assert 1 <= sample.verify_steps <= sample.emitted_tokens
    # One at a time: the next is submitted when the one before it has ended.
    assert alone[0].finished_at <= alone[1].submitted_at
    assert together[1].submitted_at < together[0].finished_at <= together[2].submitted_at
    # The pause before a run is no gap of it.
    assert load.idle_gaps_s == {1: [0.2], 2: [0.3, 0.4, 0.5]}


def test_an_engine_without_trace_has_no_gaps(pair: tuple[Path, Path]) -> None:
    with LLM(**engine_args("off", **fields(pair, max_num_seqs=1, threads_per_shard=1))) as llm:
        load = EngineLoad("off", llm)
        (sample,) = load.run(["one"], 2, 1, lambda: None)
    assert sample.num_tokens == 2
    assert load.idle_gaps_s == {}


def test_a_checkpoint_that_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        engine_args("dflash", "nowhere", "nowhere", {"max_num_seqs": 1})
