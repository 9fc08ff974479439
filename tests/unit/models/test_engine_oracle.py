"""The whole engine on tiny pairs, token for token as the oracle, alone and over processes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from actors.config import EngineConfig
from actors.engine import Engine
from actors.llm import LLM, RequestOutput
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from actors.trace import DEVICE
from actors.trace import Trace as StepTrace
from models.rows import StepInputs
from models.steps import ModelRank, StepResult
from tests.oracle.dflash_reference import Trace, generate, load_drafter
from tests.tiny import Kind, load_target, make_pair, train_pair
from tests.unit.models.conftest import PROMPT, Pair, PairMaker
from tests.unit.models.foresight import foresee
from tests.unit.models.processes import ProcessShards, RankProcesses

PROMPTS = [PROMPT, PROMPT[::-1], [7], list(range(100, 137)), [250, 41] * 9]
ENGINE: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,  # the longer prompts come in chunks
    "block_size": 4,
    "dtype": "float32",
    "threads_per_shard": 1,
    "backend": "eager",
}
# The oracle reads a step before it plans the next: then steps are the same, not only tokens.
SYNC: dict[str, Any] = {"async_scheduling": False}


def engine_args(pair: Pair, **changes: Any) -> dict[str, Any]:
    speculative = {"method": "dflash", "model": str(pair[1])}
    return {"model": str(pair[0]), "speculative_config": speculative, **ENGINE, **changes}


def traces_of(pair: Pair, max_tokens: int, stop: tuple[int, ...] = ()) -> list[Trace]:
    target, drafter = load_target(pair[0]), load_drafter(pair[1])
    return [generate(target, drafter, prompt, max_tokens, stop) for prompt in PROMPTS]


def assert_as_traced(output: RequestOutput, trace: Trace) -> None:
    assert list(output.token_ids) == trace.token_ids
    assert output.speculation.verify_steps == len(trace.steps)
    assert output.speculation.emitted_tokens == len(trace.token_ids) - 1
    found = output.speculation.mean_acceptance_length
    assert found == pytest.approx(trace.mean_acceptance_length, abs=1e-12)


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_the_engine_equals_the_oracle(trained: PairMaker, kind: Kind) -> None:
    pair = trained(kind)
    traces = traces_of(pair, 40)
    assert max(trace.mean_acceptance_length for trace in traces) > 1.5
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(**engine_args(pair, **SYNC)) as llm:
        together = llm.generate(PROMPTS, sampling)
        alone = [llm.generate([prompt], sampling)[0] for prompt in PROMPTS]
    for output, single, trace in zip(together, alone, traces, strict=True):
        assert output.finish_reason == "length"
        assert_as_traced(output, trace)
        assert_as_traced(single, trace)


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_every_step_verifies_and_emits_what_the_oracle_does(
    trained: PairMaker, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained(kind)
    steps: list[tuple[list[int], list[int]]] = []
    original = ModelRank.step

    def spy(rank: ModelRank, inputs: StepInputs, *others: Any) -> StepResult:
        drafts = rank.state.drafts[inputs.decode_slots].tolist()
        result = original(rank, inputs, *others)
        for row in inputs.decode_valid.nonzero().flatten().tolist():
            count = int(result.num_drafts[row])
            sampled = [token for token in result.sampled[row].tolist() if token >= 0]
            steps.append((drafts[row][:count], sampled))
        return result

    monkeypatch.setattr(ModelRank, "step", spy)
    with LLM(**engine_args(pair, **SYNC)) as llm:
        for prompt, trace in zip(PROMPTS, traces_of(pair, 40), strict=True):
            steps.clear()
            llm.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))
            emitted = 1
            for (drafts, sampled), step in zip(steps, trace.steps, strict=True):
                # The oracle always verifies a whole block, the engine what may still be emitted.
                assert drafts == step.drafts[: 40 - emitted - 1]
                assert sampled == step.emitted
                emitted += len(sampled)
            assert emitted == 40


def new_inside_a_block(trace: Trace) -> int:
    """A token that a step emitted neither first nor last, and nothing did before."""
    seen = {trace.token_ids[0]}
    for step in trace.steps:
        for i, token in enumerate(step.emitted):
            if 0 < i < len(step.emitted) - 1 and token not in seen:
                return token
            seen.add(token)
    raise AssertionError("no block brings a new token")


def test_a_stop_token_in_the_middle_of_a_block_ends_the_request(trained: PairMaker) -> None:
    pair = trained("qwen3")
    stop = new_inside_a_block(traces_of(pair, 40)[0])
    traces = traces_of(pair, 40, (stop,))
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    with LLM(**engine_args(pair, **SYNC)) as llm:
        outputs = llm.generate(PROMPTS, sampling)
    assert outputs[0].finish_reason == "stop"
    assert outputs[0].token_ids[-1] == stop
    for output, trace in zip(outputs, traces, strict=True):
        assert_as_traced(output, trace)


def test_speculation_changes_no_token(trained: PairMaker) -> None:
    pair = trained("llama3")
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM(**engine_args(pair, speculative_config=None)) as plain:
        outputs = plain.generate(PROMPTS, sampling)
    for output, trace in zip(outputs, traces_of(pair, 30), strict=True):
        assert list(output.token_ids) == trace.token_ids
        assert output.speculation.mean_acceptance_length == 1.0


def test_perfect_drafts_fill_every_block(
    trained: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained("qwen3")
    num_drafts, num_steps = 4, 6
    num_tokens = 1 + num_steps * (num_drafts + 1)
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    with LLM(**engine_args(pair, speculative_config=None)) as plain:
        expected = plain.generate([PROMPT], sampling)[0].token_ids

    foresee(monkeypatch, {sampling.seed: [*PROMPT, *expected]})
    with LLM(**engine_args(pair)) as llm:
        output = llm.generate([PROMPT], sampling)[0]
    assert output.token_ids == expected
    assert output.speculation.verify_steps == num_steps
    assert output.speculation.mean_acceptance_length == num_drafts + 1


def random_row(seed: int | None) -> Callable[[Sequence[str]], str | None] | None:
    """Leaves a random row out of each step; None leaves out nothing."""
    return None if seed is None else random.Random(seed).choice


@pytest.mark.parametrize("speculation", [True, False], ids=["speculative", "plain"])
@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_no_schedule_changes_a_token(
    pair: PairMaker, trained: PairMaker, kind: Kind, speculation: bool
) -> None:
    """Running ahead, with any row left out of any step, any number of drafts proposed and verified;
    drafts are rarely or often right."""
    files = trained(kind) if kind == "qwen3" else pair(kind)
    traces = traces_of(files, 40)
    stop = traces[0].token_ids[9]
    samplings = [
        SamplingParams(max_tokens=n, ignore_eos=True, stop_token_ids=(stop,))
        for n in (40, 33, 1, 2, 21)
    ]
    changes: dict[str, Any] = {} if speculation else {"speculative_config": None}

    def generated(
        is_async: bool,
        seed: int | None = None,
        trace: StepTrace | None = None,
        choices: Sequence[int] | None = None,
    ) -> list[tuple[tuple[int, ...], str]]:
        args = engine_args(files, async_scheduling=is_async, **changes)
        with LLM(**args, leave_out=random_row(seed), trace=trace) as llm:
            if choices is not None:
                rng, chooser = random.Random(seed), llm._engine.scheduler.speculation
                chooser.choose = lambda rows: rng.choice(choices)  # type: ignore[method-assign]
            outputs = llm.generate(PROMPTS, samplings)
            llm._engine.scheduler.check_idle()
        return [(output.token_ids, output.finish_reason) for output in outputs]

    sync, ahead = StepTrace(), StepTrace()
    expected = generated(False, trace=sync)
    for (tokens, reason), trace, sampling in zip(expected, traces, samplings, strict=True):
        plain = trace.token_ids[: sampling.max_tokens]
        end = plain.index(stop) + 1 if stop in plain else len(plain)
        assert (list(tokens), reason) == (plain[:end], "stop" if stop in plain else "length")
    assert {reason for _, reason in expected} == {"stop", "length"}
    assert generated(True, trace=ahead) == expected
    assert submitted_early(ahead) > submitted_early(sync) == 0
    for seed in range(3):
        assert generated(True, seed) == expected
        assert generated(False, seed) == expected
    if speculation:
        for seed, choices in enumerate([(0,), (0, 1, 3), (1,), (0, 2), (2, 3)]):
            assert generated(True, seed, choices=choices) == expected


def submitted_early(trace: StepTrace) -> int:
    """Steps that were submitted before the step in front of them was read."""
    when = {(span.name, span.args.get("step", 0)): span.start_s for span in trace.spans}
    return sum(
        name == "submit" and start_s < when["read", step - 1]
        for (name, step), start_s in when.items()
        if step > 1
    )


def test_a_trace_has_every_step_of_the_device(pair: PairMaker) -> None:
    trace = StepTrace()
    with LLM(**engine_args(pair("qwen3")), trace=trace) as llm:
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6, ignore_eos=True))
    steps = [span for span in trace.spans if span.track == DEVICE]
    numbers = [span.args["step"] for span in steps]
    assert numbers == list(range(1, len(steps) + 1))
    assert all(span.duration_s is not None and span.duration_s > 0 for span in steps)
    gaps = trace.idle_gaps_s()
    assert len(gaps) == len(steps) - 1
    assert min(gaps) >= 0


def test_next_token_logits_judge_the_first_token(trained: PairMaker) -> None:
    pair = trained("qwen3")
    with LLM(**engine_args(pair)) as llm:
        for prompt, trace in zip(PROMPTS, traces_of(pair, 1), strict=True):
            logits = llm.next_token_logits(prompt)
            assert logits.dtype == torch.float32
            assert [int(logits.argmax())] == trace.token_ids


def test_processes_of_every_size_generate_the_same(
    rank_processes: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """9 query and 3 KV heads and odd widths, over gloo: exact, padded and split layouts."""
    pair = make_pair(
        tmp_path_factory.mktemp("odd"),
        "llama-tied",
        num_heads=9,
        num_kv_heads=3,
        hidden_size=45,
        intermediate_size=65,
        vocab_size=301,
        num_layers=4,
        target_layer_ids=(0, 2),
        biases=True,
        drafter_options={"attention_bias": True},
    )
    train_pair(*pair, [PROMPT, PROMPT[::-1]], max_new_tokens=20)
    traces = traces_of(pair, 16)[:3]
    assert max(trace.mean_acceptance_length for trace in traces) > 1.5

    for size in (1, 2, 3, 4):
        config = EngineConfig.resolve(engine_args(pair, tensor_parallel_size=size))
        shards = ProcessShards(rank_processes, config)
        chunks: list[TokenChunk] = []
        try:
            engine = Engine(config, shards, chunks.extend)
            engine.add_all(
                [
                    GenerateRequest(
                        request_id=str(i),
                        prompt_token_ids=tuple(prompt),
                        sampling=SamplingParams(max_tokens=16, ignore_eos=True),
                    )
                    for i, prompt in enumerate(PROMPTS[:3])
                ]
            )
            while engine.step():
                pass
        finally:
            shards.close()
        for i, trace in enumerate(traces):
            mine = [chunk for chunk in chunks if chunk.request_id == str(i)]
            assert [token for chunk in mine for token in chunk.token_ids] == trace.token_ids
            speculation = mine[-1].speculation
            assert speculation is not None
            # Near the end of a request, a step that runs ahead may have to verify fewer drafts.
            assert len(trace.steps) <= speculation.verify_steps < len(trace.token_ids)
