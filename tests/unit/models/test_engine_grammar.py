"""Guided requests in the whole engine, against plain generation in Python."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLParserLimits
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from actors import grammar_compiler
from actors.config import EngineConfig
from actors.grammar import Grammars
from actors.grammar_probe import GrammarProbe
from actors.llm import LLM, RequestOutput
from actors.messages import GenerateRequest, Guide, SamplingParams
from tests.oracle.dflash_reference import train_drafter
from tests.oracle.plain_sampling import sample_plainly
from tests.tiny import load_target, make_pair
from tests.unit.models.conftest import PROMPT, Pair
from tests.unit.models.foresight import foresee
from tests.unit.models.processes import RankProcesses, generate_on
from tests.unit.models.test_engine_oracle import engine_args, random_row
from tests.unit.models.test_engine_sampling import Case, assert_expected

NUM_DRAFTS = 4
VOCAB_SIZE = 301  # ranks get columns that no mask has
EOS = 258
PROMPTS = [PROMPT, list(range(100, 137)), [250, 41] * 9]

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "t": {"type": "array", "items": {"enum": ["x", True]}, "maxItems": 2},
    },
    "required": ["a", "n", "t"],
    "additionalProperties": False,
}
GUIDES = {
    "words": Guide(kind="regex", source="([a-z]{3,7} ){2}[a-z]{3,7}"),
    "schema": Guide(kind="json_schema", source=json.dumps(SCHEMA)),
    "numbers": Guide(kind="regex", source="[0-9]{2,4}(,[0-9]{1,3}){0,4}"),
    "choice": Guide(kind="regex", source="yes|no|maybe"),
    "lark": Guide(kind="grammar", source='start: "[" (start | "x")~1..2 "]" | "y"'),
}

GREEDY: dict[str, Any] = {"max_tokens": 50, "seed": 2**40 + 7}
WARM = GREEDY | {"temperature": 1.0}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "warm": WARM,
    "cuts": WARM | {"top_k": 5, "top_p": 0.8, "min_p": 0.01},
    "penalties": GREEDY | {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    "warm penalties": WARM | {"frequency_penalty": 1.0, "logprobs": 2, "prompt_logprobs": 0},
    "biases": WARM | {"logit_bias": ((EOS, 20.0), (70, 9.0), (75, -100.0))},
    "min_tokens": WARM | {"min_tokens": 12, "logit_bias": ((EOS, 20.0),)},
}


class GuidedCase(Case):
    """A request, guided or not, and what plain generation gives it."""

    def __init__(
        self,
        target: PreTrainedModel,
        grammars: Grammars,
        guide: Guide | None,
        fields: dict[str, Any],
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        self.prompt, self.guide = list(prompt), guide
        self.sampling = SamplingParams(**fields, guide=guide)
        self.stops = {*self.sampling.stop_token_ids, *([] if self.sampling.ignore_eos else [EOS])}
        state = None if guide is None else grammars.start(guide)
        self.expected = sample_plainly(target, prompt, self.sampling, self.stops, state)

    @property
    def reason(self) -> str:
        return "stop" if self.expected[-1] in self.stops else "length"


@pytest.fixture(autouse=True)
def trusted_guides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each guide of each engine would take most of the time."""
    monkeypatch.setattr(GrammarProbe, "ask", lambda *_: "")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("guided")
    return make_pair(directory, "qwen3", vocab_size=VOCAB_SIZE, eos_token_id=EOS)


@pytest.fixture(scope="module")
def target(files: Pair) -> PreTrainedModel:
    return load_target(files[0])


@pytest.fixture(scope="module")
def grammars(files: Pair) -> Grammars:
    return Grammars(files[0], vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def guided(target: PreTrainedModel, grammars: Grammars) -> list[GuidedCase]:
    """They end with a whole text."""
    plain = [
        GuidedCase(target, grammars, guide, FIELDS[name])
        for guide in GUIDES.values()
        for name in ("greedy", "warm")
    ]
    return plain + [
        GuidedCase(target, grammars, GUIDES[("words", "schema")[i % 2]], fields, PROMPTS[i % 3])
        for i, fields in enumerate(FIELDS.values())
    ]


@pytest.fixture(scope="module")
def others(
    target: PreTrainedModel, grammars: Grammars, guided: list[GuidedCase]
) -> list[GuidedCase]:
    """Guided ones that end early or late, and some without a guide."""
    words, choice = GUIDES["words"], GUIDES["choice"]
    return [
        GuidedCase(target, grammars, words, WARM | {"max_tokens": 7}),
        GuidedCase(target, grammars, words, GREEDY | {"stop_token_ids": (guided[0].expected[6],)}),
        GuidedCase(target, grammars, choice, WARM | {"ignore_eos": True, "max_tokens": 12}),
        *(
            GuidedCase(target, grammars, None, fields | {"max_tokens": 20}, prompt)
            for fields, prompt in zip(
                (GREEDY, WARM, FIELDS["warm penalties"]), PROMPTS, strict=True
            )
        ),
    ]


@pytest.fixture(scope="module")
def conflicts(target: PreTrainedModel, grammars: Grammars) -> list[GuidedCase]:
    """What the request itself forbids is, at some place, all that the grammar allows."""
    two, ab = Guide(kind="regex", source="[0-9]{2}"), Guide(kind="regex", source="[ab]{9}")
    a, b = id_of("a"), id_of("b")
    return [
        GuidedCase(target, grammars, guide, fields | changes)
        for fields in (GREEDY, WARM)
        for guide, changes in [
            (two, {"min_tokens": 6}),
            (two, {"min_tokens": 6, "stop_token_ids": tuple(map(id_of, "0123456789"))}),
            (ab, {"bad_words": ((a,), (b,))}),
            (ab, {"bad_words": ((a,), (b, b))}),
        ]
    ]


@pytest.fixture(scope="module")
def pair(files: Pair, target: PreTrainedModel, guided: list[GuidedCase]) -> Pair:
    """Its drafter knows greedy answers to some extent."""
    sequences = [case.prompt + case.expected for case in guided if case.sampling.temperature == 0]
    train_drafter(files[1], target, sequences, num_steps=100, seed=0)
    return files


def id_of(character: str) -> int:
    """In the tokenizer of `tests.tiny`."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(character)


def shuffled(*cases: Sequence[GuidedCase]) -> list[GuidedCase]:
    mixed = [case for some in cases for case in some]
    random.Random(0).shuffle(mixed)
    return mixed


def generate(llm: LLM, cases: Sequence[GuidedCase]) -> list[RequestOutput]:
    """The outputs, as they are expected."""
    outputs = llm.generate([case.prompt for case in cases], [case.sampling for case in cases])
    llm._engine.scheduler.check_idle()
    assert_expected(outputs, cases)
    for output, case in zip(outputs, cases, strict=True):
        assert output.finish_reason == case.reason, case.sampling
    return outputs


def is_whole(guide: Guide, text: str) -> bool:
    if guide.kind == "regex":
        return re.fullmatch(guide.source, text) is not None
    if guide.kind == "grammar":
        assert text.count("[") == text.count("]")
        return re.fullmatch(r"[\[\]xy]+", text) is not None
    value = json.loads(text)
    assert list(value) == ["a", "n", "t"]
    assert re.fullmatch("[a-z]{1,6}", value["a"])
    assert type(value["n"]) is int
    assert len(value["t"]) <= 2
    return 0 <= value["n"] <= 99 and all(item in ("x", True) for item in value["t"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": False},
        {"speculative_config": None},
        {"speculative_config": None, "async_scheduling": False},
        {"max_num_seqs": 1},
        {"max_num_seqs": 6, "max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 16, "buckets": {"prefill_widths": [4]}},
    ],
    ids=["async", "sync", "plain", "plain sync", "alone", "many, whole prompts", "small chunks"],
)
def test_tokens_are_those_of_plain_generation(
    pair: Pair, guided: list[GuidedCase], others: list[GuidedCase], changes: dict[str, Any]
) -> None:
    """Whatever else is in the batch: guided requests and others share steps."""
    with LLM(**engine_args(pair, **changes)) as llm:
        generate(llm, shuffled(guided, others))


def test_every_text_is_whole(pair: Pair, guided: list[GuidedCase]) -> None:
    with LLM(**engine_args(pair)) as llm:
        outputs = generate(llm, guided)
    for output, case in zip(outputs, guided, strict=True):
        assert case.guide is not None
        assert is_whole(case.guide, output.text), output.text
        assert (output.token_ids[-1], output.finish_reason) == (EOS, "stop")


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_guided_requests_speculate(pair: Pair, guided: list[GuidedCase], ahead: bool) -> None:
    greedy = [case for case in guided if case.sampling == guided[0].sampling]
    with LLM(**engine_args(pair, async_scheduling=ahead)) as llm:
        outputs = generate(llm, greedy)
    assert all(output.speculation.accepted_tokens > 0 for output in outputs)


def test_no_schedule_changes_a_token(
    pair: Pair, guided: list[GuidedCase], others: list[GuidedCase]
) -> None:
    """Any row left out of any step, any number of drafts proposed and verified."""
    with LLM(**engine_args(pair), leave_out=random_row(0)) as llm:
        rng, chooser = random.Random(0), llm._engine.scheduler.speculation
        chooser.choose = lambda rows: rng.randint(0, NUM_DRAFTS)  # type: ignore[method-assign]
        generate(llm, shuffled(guided, others))


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_preemption_changes_no_token(
    pair: Pair, guided: list[GuidedCase], others: list[GuidedCase], ahead: bool
) -> None:
    with LLM(**engine_args(pair, async_scheduling=ahead, num_kv_pages=25)) as llm:
        generate(llm, shuffled(guided, others))
        assert llm.stats.preemptions > 0


def test_cached_is_cold(pair: Pair, guided: list[GuidedCase]) -> None:
    cases = [case for case in guided if case.sampling.prompt_logprobs is None]
    with LLM(**engine_args(pair, enable_prefix_caching=False)) as llm:
        assert not any(output.cached_tokens for output in generate(llm, cases))
    with LLM(**engine_args(pair, num_kv_pages=1000)) as llm:
        generate(llm, cases)
        assert all(output.cached_tokens for output in generate(llm, cases))


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_right_drafts_are_accepted_whatever_the_grammar_cuts(
    pair: Pair,
    guided: list[GuidedCase],
    others: list[GuidedCase],
    monkeypatch: pytest.MonkeyPatch,
    wrong: float,
) -> None:
    with LLM(**engine_args(pair)) as llm:
        for case in (*guided, *others):
            with monkeypatch.context() as patch:
                foresee(patch, {case.sampling.seed: [*case.prompt, *case.expected]}, wrong)
                (output,) = generate(llm, [case])
            if not wrong and case.reason == "stop":
                steps = -(-(len(case.expected) - 1) // (NUM_DRAFTS + 1))
                assert output.speculation.verify_steps == steps


def test_the_grammar_has_its_way(pair: Pair, conflicts: list[GuidedCase]) -> None:
    with LLM(**engine_args(pair)) as llm:
        outputs = generate(llm, conflicts)
    for i, pattern in enumerate(("[0-9]{2}", "[0-9]", "[ab]{9}", "[ab]{9}") * 2):
        assert re.fullmatch(pattern, outputs[i].text)
        assert outputs[i].finish_reason == "stop"


def test_a_grammar_that_takes_too_much_ends_only_its_request(
    pair: Pair,
    conflicts: list[GuidedCase],
    others: list[GuidedCase],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=60)
    monkeypatch.setattr(grammar_compiler, "LIMITS", limits)
    sampling = SamplingParams(
        max_tokens=80,
        temperature=1.0,
        min_tokens=80,
        guide=Guide(kind="regex", source="[abc]*a[abc]{30}b"),
    )
    fine = [*conflicts, *(case for case in others if case.guide is None)]
    with LLM(**engine_args(pair)) as llm:
        failing, *outputs = llm.generate(
            [PROMPT, *(case.prompt for case in fine)],
            [sampling, *(case.sampling for case in fine)],
        )
        llm._engine.scheduler.check_idle()
    assert failing.finish_reason == "length"
    assert re.fullmatch("[abc]{1,78}", failing.text)
    assert failing.token_ids[-1] == EOS
    assert_expected(outputs, fine)


def test_ranks_follow_a_grammar_as_one(
    rank_processes: RankProcesses,
    pair: Pair,
    guided: list[GuidedCase],
    conflicts: list[GuidedCase],
    others: list[GuidedCase],
) -> None:
    cases = [*guided[::3], *conflicts, *others]
    args = engine_args(pair, tensor_parallel_size=2, max_num_seqs=len(cases))
    config = EngineConfig.resolve(args | {"max_num_batched_tokens": 256})
    messages = [
        GenerateRequest(
            request_id=str(i), prompt_token_ids=tuple(case.prompt), sampling=case.sampling
        )
        for i, case in enumerate(cases)
    ]
    for chunks, case in zip(generate_on(rank_processes, config, messages), cases, strict=True):
        assert [token for chunk in chunks for token in chunk.token_ids] == case.expected
        assert chunks[-1].finish_reason == case.reason
