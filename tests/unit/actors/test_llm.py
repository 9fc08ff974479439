"""`LLM` over a shard that recites, without weights: what `generate` makes of prompts and ends."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actors.llm
from actors.errors import ConfigError, RequestRejected
from actors.llm import LLM
from actors.messages import SamplingParams, StepOutput, StepPlan, decode_plan, encode


class RecitingShard:
    """Every step gives every emitting row one token more than the row's position."""

    def __init__(self, config: object, rank: int, *, trace: object = None) -> None:
        self.interrupt_in = -1
        self.most_rows = 0
        self.interrupt_takes_output = False
        self._in_flight: StepPlan | None = None

    def load(self) -> None:
        pass

    def step(self, payload: bytes) -> bytes:
        self.interrupt_in -= 1
        if self.interrupt_in == 0 and not self.interrupt_takes_output:
            raise KeyboardInterrupt
        plan = decode_plan(payload)
        self.most_rows = max(self.most_rows, len(plan.decode) + len(plan.prefill))
        previous, self._in_flight = self._in_flight, plan if plan.bucket else None
        if self.interrupt_in == 0:
            raise KeyboardInterrupt
        if previous is None:
            return encode(None)
        ends = [row.position + 1 for row in previous.decode]
        ends += [row.start + len(row.token_ids) for row in previous.prefill if row.last]
        return encode(
            StepOutput(
                step=previous.step,
                sampled=tuple((end,) for end in ends),
                num_drafts=(0,) * len(ends),
            )
        )

    def close(self) -> None:
        pass


class CharTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(char) % 64 for char in text]

    def decode(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        return "-".join(str(token_id) for token_id in token_ids)


@pytest.fixture
def target(tmp_path: Path) -> str:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def llm(target: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(actors.llm, "Shard", RecitingShard)
    with LLM(target, max_num_seqs=2, backend="eager") as llm:
        llm._tokenizer = CharTokenizer()
        yield llm


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    limits = [9, 1, 3, 2]
    outputs = llm.generate(
        [[5] * (i + 1) for i in range(4)], [SamplingParams(max_tokens=n) for n in limits]
    )
    assert [len(output.token_ids) for output in outputs] == limits
    assert [len(output.prompt_token_ids) for output in outputs] == [1, 2, 3, 4]
    assert outputs[3].token_ids == (4, 5)
    assert outputs[3].text == "4-5"
    assert {output.finish_reason for output in outputs} == {"length"}


def test_one_sampling_serves_all_prompts(llm: LLM) -> None:
    outputs = llm.generate(["ab", [1, 2, 3]], SamplingParams(max_tokens=2))
    assert [output.token_ids for output in outputs] == [(2, 3), (3, 4)]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_single_text_is_one_prompt(llm: LLM) -> None:
    """As in vLLM; taken as a sequence it would be a prompt per character."""
    (output,) = llm.generate("abc", SamplingParams(max_tokens=1))
    assert len(output.prompt_token_ids) == 3


def test_a_rejected_prompt_keeps_all_from_running(llm: LLM) -> None:
    with pytest.raises(RequestRejected):
        llm.generate([[1], [1] * 64])
    assert llm.stats.prompt_tokens == 0
    assert len(llm.generate([[1]], SamplingParams(max_tokens=2))[0].token_ids) == 2
    assert llm.stats.requests == {"length": 1}


def test_samplings_that_do_not_match_the_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="zip"):
        llm.generate([[1], [2]], [SamplingParams(max_tokens=1)])
    assert llm.stats.prompt_tokens == 0


@pytest.mark.parametrize("takes_output", [False, True])
@pytest.mark.parametrize("interrupt_in", [1, 2, 3, 4])
def test_an_interrupted_call_leaves_nothing_for_the_next(
    llm: LLM, interrupt_in: int, takes_output: bool
) -> None:
    shard = llm._shard
    assert isinstance(shard, RecitingShard)
    shard.interrupt_in, shard.interrupt_takes_output = interrupt_in, takes_output
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [5], [6]], SamplingParams(max_tokens=20))
    outputs = llm.generate([[1, 2], [1]], SamplingParams(max_tokens=3))
    assert [output.token_ids for output in outputs] == [(2, 3, 4), (1, 2, 3)]
    assert llm.stats.requests == {"abort": 3, "length": 2}


def test_a_failing_progress_bar_leaves_nothing_for_the_next(llm: LLM) -> None:
    def fail() -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError):
        llm.generate([[1], [5]], [SamplingParams(max_tokens=n) for n in (1, 9)], fail)
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert output.token_ids == (2, 3)


def test_no_more_requests_are_in_flight_than_asked_for(llm: LLM) -> None:
    prompts = [[5] * (i + 1) for i in range(5)]
    sampling = [SamplingParams(max_tokens=n) for n in (3, 1, 4, 2, 2)]
    finished: list[None] = []
    limited = llm.generate(
        prompts, sampling, on_finish=lambda: finished.append(None), max_in_flight=1
    )
    assert llm._shard.most_rows == 1  # type: ignore[attr-defined]
    assert len(finished) == 5
    free = llm.generate(prompts, sampling)
    assert llm._shard.most_rows == 2  # type: ignore[attr-defined]
    assert [output.token_ids for output in limited] == [output.token_ids for output in free]


def test_a_held_back_request_is_submitted_when_another_ends(llm: LLM) -> None:
    first, second = (
        output.timing
        for output in llm.generate([[1], [2]], SamplingParams(max_tokens=3), max_in_flight=1)
    )
    assert first.submitted_at < first.first_token_at < first.finished_at
    assert first.finished_at <= second.submitted_at < second.first_token_at < second.finished_at


def test_a_rejected_prompt_that_is_held_back_keeps_all_from_running(llm: LLM) -> None:
    with pytest.raises(RequestRejected):
        llm.generate([[1], [1] * 64], max_in_flight=1)
    assert llm.stats.prompt_tokens == 0


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_lets_nothing_run_is_refused(llm: LLM, limit: int) -> None:
    with pytest.raises(ValueError, match=f"max_in_flight is {limit}, at least 1"):
        llm.generate([[1], [2]], max_in_flight=limit)


def test_several_ranks_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        LLM(target, tensor_parallel_size=2, backend="eager")
