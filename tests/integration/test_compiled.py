"""Compiled steps on the demo pair: nothing is compiled after warm-up, and rounding is the same
whatever stands in a batch."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from actors.llm import LLM
from actors.messages import SamplingParams
from tests.integration.demo import demo_args, short_prompts

# Few sizes, so that compiling takes seconds.
BUCKETS = {"decode_sequences": [1, 2, 4], "prefill_widths": [16]}


@pytest.fixture(scope="module")
def warm() -> Iterator[LLM]:
    """The demo pair in bfloat16, warmed up; whatever is compiled later is an error.

    How many drafts a step verifies is a matter of chance, so that all choices are met.
    """
    args = demo_args(dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=64, buckets=BUCKETS)
    with LLM(**args, late_compile="error") as llm:
        llm.warm_up()
        rng, speculation = random.Random(0), llm._engine.scheduler.speculation
        speculation.choose = lambda rows: rng.choice([0, 3, 9])  # type: ignore[method-assign]
        yield llm


@pytest.fixture(scope="module")
def plain_bfloat16() -> Iterator[LLM]:
    with LLM(**demo_args(dtype="bfloat16", max_num_seqs=1, speculative_config=None)) as llm:
        yield llm


def test_a_mixed_run_after_warm_up_compiles_nothing(warm: LLM) -> None:
    """200 requests of all lengths; stops, length limits, and a run that is interrupted."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, 49_000) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 70, 150]))]
        for _ in range(200)
    ]
    sampling = [
        SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 10, 11, 14]),
            stop_token_ids=tuple(rng.sample(range(49_152), 2_000)),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in prompts
    ]
    finished = 0

    def interrupt() -> None:
        nonlocal finished
        finished += 1
        if finished == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm.generate(prompts[:100], sampling[:100], on_finish=interrupt)
    outputs = warm.generate(prompts, sampling)
    assert len(outputs) == 200
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    assert warm.stats.requests["abort"] > 0
    assert warm.stats.late_compiles == 0


def test_bfloat16_is_exact(warm: LLM, plain_bfloat16: LLM) -> None:
    """Speculation, in a batch and alone, gives the tokens of plain decoding to the last one."""
    prompts = short_prompts(warm, 6)
    sampling = SamplingParams(max_tokens=40)
    expected = [plain_bfloat16.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    batched = [output.token_ids for output in warm.generate(prompts, sampling)]
    alone = [warm.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert batched == expected
    assert alone == expected
    assert warm.stats.accepted_tokens > 0


def test_sampled_bfloat16_is_exact(warm: LLM, plain_bfloat16: LLM) -> None:
    """The same with everything that a request may ask of its distribution, and nothing is compiled
    for it."""
    prompts = short_prompts(warm, 6)
    sampled = SamplingParams(max_tokens=30, temperature=0.7, top_p=0.95, seed=5)
    shaped = replace(sampled, repetition_penalty=1.1, frequency_penalty=0.2, min_tokens=20)
    wanted = [
        sampled,
        replace(sampled, temperature=1.0, top_k=40, min_p=0.02, logprobs=3),
        shaped,
        replace(shaped, temperature=0.0, presence_penalty=0.5, prompt_logprobs=1),
        replace(sampled, temperature=0.1, logit_bias=((260, 5.0),), bad_words=((198,), (30, 216))),
        SamplingParams(max_tokens=30, logprobs=0),
    ]
    expected = [
        plain_bfloat16.generate([prompt], sampling)[0]
        for prompt, sampling in zip(prompts, wanted, strict=True)
    ]
    for output, other in zip(warm.generate(prompts, wanted), expected, strict=True):
        assert output.token_ids == other.token_ids
        for found, before in (
            (output.logprobs, other.logprobs),
            (output.prompt_logprobs[1:], other.prompt_logprobs[1:]),
        ):
            scores = [
                [entry.logprob if entry else None for entry in run] for run in (found, before)
            ]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert warm.stats.late_compiles == 0


def test_logits_are_captured_where_asked(tmp_path: Path) -> None:
    """Every step leaves a file whose argmaxes are what was emitted and drafted."""
    args = demo_args(max_num_seqs=1, buckets=BUCKETS | {"decode_sequences": [1]})
    with LLM(**args, debug_logits_dir=str(tmp_path / "logits")) as llm:
        (prompt,) = short_prompts(llm, 1)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    files = sorted((tmp_path / "logits").iterdir())
    assert len(files) >= output.speculation.verify_steps + 1
    emitted: list[int] = []
    drafts: list[int] = []
    for file in files:
        step = load_file(file)
        row = [token for token in step["sampled"][0].tolist() if token >= 0]
        chosen = step["target_logits"].argmax(-1).tolist()
        if not emitted:
            assert chosen == row, "a prefill's only row"
        else:
            assert chosen[: len(row)] == row
            assert row[:-1] == drafts[: len(row) - 1], "what was accepted had been drafted"
        assert step["draft_logits"].shape == (1, 9, 49_152)
        drafts = step["draft_logits"][0].argmax(-1).tolist()
        emitted += row
    assert tuple(emitted[:6]) == output.token_ids


def test_a_reduced_target_runs(caplog: pytest.LogCaptureFixture) -> None:
    args = demo_args(max_num_seqs=1, buckets=BUCKETS | {"decode_sequences": [1]})
    with LLM(**args, profile_num_layers=6) as llm:
        assert llm.config.target.decoder.num_layers == 6
        (prompt,) = short_prompts(llm, 1)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4
    assert "not meaningful" in caplog.text
