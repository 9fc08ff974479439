"""Every sampling parameter in the whole engine, against plain generation in Python."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from actors.config import EngineConfig
from actors.llm import LLM, RequestOutput
from actors.messages import GenerateRequest, SamplingParams, TokenLogprobs
from actors.seeds import choice_seed
from tests.oracle.plain_sampling import all_logits, sample_plainly
from tests.tiny import load_target, make_pair, train_pair
from tests.unit.models.conftest import PROMPT, Pair, PairMaker
from tests.unit.models.foresight import foresee
from tests.unit.models.processes import RankProcesses, generate_on
from tests.unit.models.test_engine_oracle import engine_args, random_row

NUM_DRAFTS = 4
NUM_TOKENS = 20
PROMPTS = [PROMPT, list(range(100, 137)), [250, 41] * 9]

# One field each, on top of what it needs to matter.
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 2**40 + 7}
WARM = GREEDY | {"temperature": 1.0}
MILD = GREEDY | {"temperature": 0.5}
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (GREEDY, {"temperature": 1.0}),
    "cold": (WARM, {"temperature": 0.1}),
    "nearly greedy": (WARM, {"temperature": 1e-6}),
    "seed": (WARM, {"seed": -3}),
    "seed_high": (WARM, {"seed": 2**41 + 7}),
    "top_p": (WARM, {"top_p": 0.5}),
    "top_k": (WARM, {"top_k": 4}),
    "min_p": (WARM, {"min_p": 0.3}),
    "presence_penalty": (MILD, {"presence_penalty": 2.0}),
    "frequency_penalty": (MILD, {"frequency_penalty": 2.0}),
    "repetition_penalty": (MILD, {"repetition_penalty": 1.5}),
    "greedy_penalties": (
        GREEDY,
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    ),
    "logit_bias": (MILD, {"logit_bias": ((3, 6.0), (92, 5.0), (41, -100.0))}),
    "all": (
        GREEDY,
        {
            "temperature": 0.8,
            "top_p": 0.95,
            "top_k": 50,
            "min_p": 0.001,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "logit_bias": ((3, 2.0), (7, 1.5)),
        },
    ),
}


class Case:
    """A request and what plain generation gives it."""

    def __init__(self, target: PreTrainedModel, prompt: Sequence[int], fields: dict[str, Any]):
        self.prompt, self.sampling = list(prompt), SamplingParams(**fields)
        self.expected = sample_plainly(target, prompt, self.sampling, self.sampling.stop_token_ids)


@pytest.fixture(scope="module")
def target(trained: PairMaker) -> PreTrainedModel:
    return load_target(trained("qwen3")[0])


@pytest.fixture(scope="module")
def cases(target: PreTrainedModel) -> dict[str, list[Case]]:
    """For each field, one case per prompt, of which at least one shows that the field acts."""
    made = {}
    plain: dict[str, list[Case]] = {}
    for name, (base, changes) in FIELDS.items():
        key = repr(base)
        if key not in plain:
            plain[key] = [Case(target, prompt, base) for prompt in PROMPTS]
        made[name] = [Case(target, prompt, base | changes) for prompt in PROMPTS]
        assert any(a.expected != b.expected for a, b in zip(plain[key], made[name], strict=True))
    made["bad_words"] = [
        Case(target, case.prompt, MILD | {"bad_words": words(case.expected)})
        for case in plain[repr(MILD)]
    ]
    for free, bound in zip(plain[repr(MILD)], made["bad_words"], strict=True):
        assert bound.expected != free.expected
    made["stop"] = [
        Case(target, case.prompt, MILD | {"stop_token_ids": (case.expected[5], 1)})
        for case in plain[repr(MILD)]
    ]
    made["min_tokens"] = [
        Case(
            target,
            case.prompt,
            MILD | {"stop_token_ids": case.sampling.stop_token_ids, "min_tokens": 9},
        )
        for case in made["stop"]
    ]
    # A stop token may come right behind the least that is wanted.
    made["min_tokens, just"] = [
        Case(
            target,
            case.prompt,
            MILD
            | {
                "stop_token_ids": case.sampling.stop_token_ids,
                "min_tokens": len(case.expected) - 1,
            },
        )
        for case in made["stop"]
    ]
    for free, bound in zip(made["stop"], made["min_tokens, just"], strict=True):
        assert bound.expected == free.expected
    assert all(len(case.expected) <= 6 for case in made["stop"])
    assert all(len(case.expected) >= 10 for case in made["min_tokens"])
    return made


def words(expected: list[int]) -> tuple[tuple[int, ...], ...]:
    """Of one, two and three tokens, each of which would occur, and one that begins to."""
    never = 299 if expected[12] != 299 else 298
    return (
        (expected[2],),
        tuple(expected[6:8]),
        tuple(expected[9:12]),
        (*expected[0:2], never),
    )


def all_of(cases: dict[str, list[Case]]) -> list[Case]:
    return [case for same in cases.values() for case in same]


def run(pair: Pair, cases: Sequence[Case], leave_out: Any = None, **changes: Any) -> list[Any]:
    with LLM(**engine_args(pair, **changes), leave_out=leave_out) as llm:
        outputs = llm.generate([case.prompt for case in cases], [case.sampling for case in cases])
        llm._engine.scheduler.check_idle()
    return outputs


def assert_expected(outputs: Sequence[RequestOutput], cases: Sequence[Case]) -> None:
    for output, case in zip(outputs, cases, strict=True):
        assert list(output.token_ids) == case.expected, case.sampling


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": False},
        {"speculative_config": None},
        {"speculative_config": None, "async_scheduling": False},
        {"max_num_seqs": 1},
        {"max_num_seqs": 16, "max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 16, "buckets": {"prefill_widths": [4]}},
    ],
    ids=["async", "sync", "plain", "plain sync", "alone", "sixteen, whole prompts", "small chunks"],
)
def test_tokens_are_those_of_plain_generation(
    trained: PairMaker, cases: dict[str, list[Case]], changes: dict[str, Any]
) -> None:
    """Whatever else is in the batch: greedy, sampled and shaped requests share steps."""
    everything = all_of(cases)
    random.Random(0).shuffle(everything)
    assert_expected(run(trained("qwen3"), everything, **changes), everything)


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_token(
    trained: PairMaker, cases: dict[str, list[Case]], seed: int
) -> None:
    everything = all_of(cases)
    random.Random(seed).shuffle(everything)
    outputs = run(trained("qwen3"), everything, random_row(seed), async_scheduling=bool(seed % 2))
    assert_expected(outputs, everything)


def known(case: Case) -> dict[int, list[int]]:
    """What `foresee` has to know of a case."""
    return {case.sampling.seed: [*case.prompt, *case.expected]}


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_every_token_of_a_block_is_chosen_behind_those_before_it(
    trained: PairMaker,
    cases: dict[str, list[Case]],
    monkeypatch: pytest.MonkeyPatch,
    wrong: float,
) -> None:
    with LLM(**engine_args(trained("qwen3"), async_scheduling=False)) as llm:
        for case in all_of(cases):
            with monkeypatch.context() as patch:
                foresee(patch, known(case), wrong)
                (output,) = llm.generate([case.prompt], case.sampling)
            assert list(output.token_ids) == case.expected, case.sampling
            if not wrong:
                steps = -(-(len(case.expected) - 1) // (NUM_DRAFTS + 1))
                assert output.speculation.verify_steps == steps


def test_greedy_requests_are_what_they_are_among_themselves(
    trained: PairMaker, cases: dict[str, list[Case]]
) -> None:
    greedy = SamplingParams(**GREEDY)
    with LLM(**engine_args(trained("qwen3"))) as llm:
        alone = llm.generate(PROMPTS, greedy)
        others = [replace(case.sampling, seed=i) for i, case in enumerate(all_of(cases))][:12]
        mixed = [each for other in others for each in (greedy, other)]
        prompts = [PROMPTS[(i // 2) % 3] for i in range(len(mixed))]
        together = llm.generate(prompts, mixed)
    for i, output in enumerate(together[::2]):
        assert output.token_ids == alone[i % 3].token_ids


def test_a_choice_has_a_seed_of_its_own(trained: PairMaker) -> None:
    sampling = SamplingParams(**WARM)
    wanted = [replace(sampling, choice=i) for i in range(4)]
    wanted += [replace(sampling, seed=choice_seed(sampling.seed, i)) for i in range(4)]
    with LLM(**engine_args(trained("qwen3"))) as llm:
        found = [output.token_ids for output in llm.generate([PROMPT] * 8, wanted)]
    assert found[:4] == found[4:]
    assert len(set(found)) == 4


# --------------------------------------------------------------------------------- probabilities


def assert_scores(found: TokenLogprobs, logits: torch.Tensor, token: int, num_top: int) -> None:
    """`found` is what these raw `logits [vocab]` say of `token` and of the most probable ones."""
    logprobs = logits.log_softmax(0)
    assert found.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
    assert found.rank == 1 + int((logits > logits[token]).sum())
    best = logprobs.topk(num_top)
    assert [token_id for token_id, _ in found.top] == best.indices.tolist()
    assert [each for _, each in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


SCORED = [
    MILD | {"logprobs": 3, "prompt_logprobs": 2},
    GREEDY | {"logprobs": 0, "prompt_logprobs": None},
    MILD | {"logprobs": None, "prompt_logprobs": 0},
    WARM | {"top_k": 3, "logprobs": 20, "repetition_penalty": 1.5, "prompt_logprobs": 1},
    GREEDY,
]


@pytest.mark.parametrize("speculation", [True, False], ids=["speculative", "plain"])
def test_log_probabilities_are_those_of_the_raw_logits(
    trained: PairMaker, target: PreTrainedModel, speculation: bool
) -> None:
    """For requests that ask, each as many as it asks for, the prompt in one chunk or several."""
    changes: dict[str, Any] = {} if speculation else {"speculative_config": None}
    wanted = [(prompt, SamplingParams(**fields)) for fields in SCORED for prompt in PROMPTS]
    with LLM(**engine_args(trained("qwen3"), **changes)) as llm:
        outputs = llm.generate(*zip(*wanted, strict=True))
    for output, (prompt, sampling) in zip(outputs, wanted, strict=True):
        logits = all_logits(target, [*prompt, *output.token_ids])
        if sampling.logprobs is None:
            assert output.logprobs == ()
        else:
            behind = logits[len(prompt) - 1 : -1]
            for each, row, token in zip(output.logprobs, behind, output.token_ids, strict=True):
                assert_scores(each, row, token, sampling.logprobs)
        if sampling.prompt_logprobs is None:
            assert output.prompt_logprobs == ()
        else:
            first, *others = output.prompt_logprobs
            assert first is None
            for each, row, token in zip(others, logits[: len(prompt) - 1], prompt[1:], strict=True):
                assert each is not None
                assert_scores(each, row, token, sampling.prompt_logprobs)


def test_log_probabilities_end_with_the_tokens(
    trained: PairMaker,
    cases: dict[str, list[Case]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop token inside an accepted run, at whatever place of the block."""
    (case, *_) = cases["bad_words"]
    foresee(monkeypatch, known(case))
    with LLM(**engine_args(trained("qwen3"))) as llm:
        for index, token in enumerate(case.expected):
            sampling = replace(case.sampling, stop_token_ids=(token,), logprobs=1)
            (output,) = llm.generate([case.prompt], sampling)
            end = case.expected.index(token) + 1
            assert list(output.token_ids) == case.expected[:end], index
            assert len(output.logprobs) == end


# --------------------------------------------------------------------------------------- several


@pytest.fixture(scope="module")
def odd_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """9 query and 3 KV heads and odd widths: exact, padded and split layouts."""
    pair = make_pair(
        tmp_path_factory.mktemp("odd-sampled"),
        "llama-tied",
        num_heads=9,
        num_kv_heads=3,
        hidden_size=45,
        intermediate_size=65,
        vocab_size=301,
        num_layers=4,
        target_layer_ids=(0, 2),
    )
    train_pair(*pair, [PROMPT], max_new_tokens=20)
    return pair


def test_ranks_choose_and_score_as_one(rank_processes: RankProcesses, odd_pair: Pair) -> None:
    target = load_target(odd_pair[0])
    fields = [base | changes for base, changes in FIELDS.values()]
    fields += [
        MILD | {"bad_words": ((5,), (7, 9))},
        MILD | {"min_tokens": 6, "stop_token_ids": tuple(range(60))},
    ]
    wanted = [
        SamplingParams(**each | {"max_tokens": 10, "logprobs": 2, "prompt_logprobs": 1})
        for each in fields
    ]
    expected = [
        sample_plainly(target, PROMPT, sampling, sampling.stop_token_ids) for sampling in wanted
    ]
    messages = [
        GenerateRequest(request_id=str(i), prompt_token_ids=tuple(PROMPT), sampling=sampling)
        for i, sampling in enumerate(wanted)
    ]
    for size in (1, 2, 3, 4):
        config = EngineConfig.resolve(engine_args(odd_pair, tensor_parallel_size=size))
        found = generate_on(rank_processes, config, messages)
        for mine, tokens, sampling in zip(found, expected, wanted, strict=True):
            assert [token for chunk in mine for token in chunk.token_ids] == tokens, sampling
            logits = all_logits(target, [*PROMPT, *tokens])
            scores = [*mine[0].prompt_logprobs[1:], *(s for chunk in mine for s in chunk.logprobs)]
            texts = [*PROMPT[1:], *tokens]
            for place, (score, token) in enumerate(zip(scores, texts, strict=True)):
                assert score is not None
                assert_scores(score, logits[place], token, len(score.top))
                assert len(score.top) == (1 if place < len(PROMPT) - 1 else 2)


@pytest.mark.parametrize("num_emitted", [1, 4])
def test_a_request_goes_on_behind_what_another_engine_emitted(
    trained: PairMaker,
    cases: dict[str, list[Case]],
    rank_processes: RankProcesses,
    num_emitted: int,
) -> None:
    everything = [case for case in all_of(cases) if len(case.expected) > num_emitted]
    config = EngineConfig.resolve(engine_args(trained("qwen3")))
    messages = [
        GenerateRequest(
            request_id=f"{i}",
            prompt_token_ids=tuple(case.prompt),
            sampling=case.sampling,
            emitted_token_ids=tuple(case.expected[:num_emitted]),
        )
        for i, case in enumerate(everything)
    ]
    found = generate_on(rank_processes, config, messages)
    for chunks, case in zip(found, everything, strict=True):
        tokens = case.expected[:num_emitted]
        for chunk in chunks:
            assert chunk.first_index == len(tokens)
            tokens += chunk.token_ids
        assert tokens == case.expected, case.sampling
