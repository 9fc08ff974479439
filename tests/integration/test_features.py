"""What a request can ask for, on the demo pair: it changes no token but those it should."""

import json
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
import pytest

from actors.llm import LLM, RequestOutput
from actors.messages import Guide, SamplingParams
from benchmarks.structured import SCHEMAS
from tests.integration.demo import demo_args, short_prompts

SAMPLINGS = [
    SamplingParams(max_tokens=24, temperature=1.0),
    SamplingParams(max_tokens=24, temperature=0.1),
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, top_k=50, min_p=0.01),
    SamplingParams(max_tokens=24, temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(max_tokens=24, repetition_penalty=1.2, logprobs=3),
]


def seeded(samplings: Sequence[SamplingParams]) -> list[SamplingParams]:
    return [replace(sampling, seed=i) for i, sampling in enumerate(samplings)]


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def test_sampled_tokens_do_not_depend_on_speculation(plain: LLM, speculative: LLM) -> None:
    prompts = short_prompts(plain, 2) * len(SAMPLINGS)
    each = seeded([sampling for sampling in SAMPLINGS for _ in range(2)])
    alone = [plain.generate([p], s)[0] for p, s in zip(prompts, each, strict=True)]
    together = speculative.generate(prompts, each)
    assert tokens(together) == tokens(alone)
    assert sum(output.speculation.accepted_tokens for output in together) > 0
    for ours, theirs in zip(together, alone, strict=True):
        found, expected = ([e.logprob for e in output.logprobs] for output in (ours, theirs))
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_prompt_again_is_cached(speculative: LLM) -> None:
    prompt = [*range(500, 580), *range(500, 520)]
    first, second = (
        speculative.generate([prompt], SamplingParams(max_tokens=32))[0] for _ in range(2)
    )
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    assert (second.text, second.speculation) == (first.text, first.speculation)


def test_a_quarter_of_the_pages_that_are_needed(plain: LLM) -> None:
    """16 requests of 4 or 5 pages each, and 17 there are."""
    prompts = [[*prompt[:40], 600 + i] for i, prompt in enumerate(short_prompts(plain, 8) * 2)]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    args = demo_args(backend="eager", max_model_len=128, max_num_seqs=16)
    found = {}
    for num_kv_pages in (16 * 8 + 1, 17 + 1):
        with LLM(**args | {"num_kv_pages": num_kv_pages}) as llm:
            found[num_kv_pages] = llm.generate(prompts, sampling), llm.stats.preemptions
            llm._engine.scheduler.check_idle()
    (ample, none), (tight, some) = found.values()
    assert none == 0
    assert some > 0
    assert tokens(tight) == tokens(ample)


def test_schemas_hold(speculative: LLM) -> None:
    rows = [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    prompts = [speculative.encode_chat([{"role": "user", "content": r["prompt"]}]) for r in rows]
    each = [
        SamplingParams(
            max_tokens=300,
            temperature=1.0,
            seed=i,
            guide=Guide(kind="json_schema", source=json.dumps(row["schema"])),
        )
        for i, row in enumerate(rows)
    ]
    outputs = speculative.generate(prompts, each)
    for output, row in zip(outputs, rows, strict=True):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), row["schema"])
    assert sum(output.speculation.accepted_tokens for output in outputs) > 0
