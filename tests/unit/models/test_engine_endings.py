"""Every way an output ends, at every place of a block, in the whole engine."""

import json
import shutil
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from actors.errors import RequestRejected
from actors.llm import LLM, RequestOutput
from actors.messages import SamplingParams
from tests.oracle.dflash_reference import generate
from tests.tiny import load_target
from tests.unit.models.conftest import PROMPT, PairMaker
from tests.unit.models.foresight import foresee
from tests.unit.models.test_engine_oracle import engine_args

K = 4
NUM_TOKENS = 1 + 3 * (K + 1)  # the prompt's, and three whole blocks
# Where the only end token is emitted, counted from 0: in the middle of the last block.
END = 13
MANY: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 128}

BOTH = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def plain(trained: PairMaker) -> tuple[int, ...]:
    """What follows `PROMPT`."""
    target = load_target(trained("qwen3")[0])
    return tuple(generate(target, None, PROMPT, NUM_TOKENS).token_ids)


def num_steps(num_tokens: int) -> int:
    """How many verify steps so many tokens take where every draft is right."""
    return -(-(num_tokens - 1) // (K + 1))


def assert_ends(output: RequestOutput, tokens: tuple[int, ...], reason: str) -> None:
    """Ids, log-probabilities and counters of an output whose drafts were all right."""
    assert (output.token_ids, output.finish_reason) == (tokens, reason)
    assert len(output.logprobs) == len(tokens)
    stats, steps = output.speculation, num_steps(len(tokens))
    assert (stats.verify_steps, stats.emitted_tokens) == (steps, len(tokens) - 1)
    assert stats.accepted_tokens == len(tokens) - 1 - steps
    assert stats.accepted_tokens <= stats.draft_tokens <= K * steps


def assert_counted(llm: LLM, outputs: list[RequestOutput]) -> None:
    """The engine counted what its requests did, and holds nothing."""
    stats = llm.stats
    assert stats.requests == Counter(output.finish_reason for output in outputs)
    assert stats.output_tokens == sum(len(output.token_ids) for output in outputs)
    assert stats.verify_steps == sum(output.speculation.verify_steps for output in outputs)
    assert stats.draft_tokens == sum(output.speculation.draft_tokens for output in outputs)
    assert stats.accepted_tokens == sum(output.speculation.accepted_tokens for output in outputs)
    llm._engine.scheduler.check_idle()


@BOTH
def test_the_earlier_of_limit_and_stop_ends_the_output(
    trained: PairMaker, monkeypatch: pytest.MonkeyPatch, plain: tuple[int, ...], ahead: bool
) -> None:
    """All limits and all places of a stop in one batch, where blocks hold one, both or none."""
    foresee(monkeypatch, {0: [*PROMPT, *plain]})
    limits = (1, 2, K, K + 1, K + 2, 2 * K + 3, NUM_TOKENS)
    cases = [(limit, token) for limit, token in product(limits, plain)]
    samplings = [
        SamplingParams(max_tokens=limit, stop_token_ids=(token,), logprobs=0)
        for limit, token in cases
    ]
    with LLM(**engine_args(trained("qwen3"), async_scheduling=ahead, **MANY)) as llm:
        outputs = llm.generate([PROMPT] * len(cases), samplings)
        assert_counted(llm, outputs)
    for output, (limit, token) in zip(outputs, cases, strict=True):
        end = plain.index(token) + 1
        assert_ends(output, plain[: min(limit, end)], "stop" if end <= limit else "length")
    places = {plain.index(token) for token in plain}
    assert {(place - 1) % (K + 1) for place in places} == set(range(K + 1))


@BOTH
def test_the_end_token_ends_the_output_at_every_place_of_a_block(
    trained: PairMaker,
    monkeypatch: pytest.MonkeyPatch,
    plain: tuple[int, ...],
    tmp_path: Path,
    ahead: bool,
) -> None:
    """Prompts that have the first tokens of the output already move it through the block."""
    assert plain.index(plain[END]) == END
    foresee(monkeypatch, {0: [*PROMPT, *plain]})
    target, drafter = trained("qwen3")
    shutil.copytree(target, tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        config = tmp_path / "target" / name
        fields = json.loads(config.read_text())
        config.write_text(json.dumps({**fields, "eos_token_id": plain[END]}))
    prompts = [[*PROMPT, *plain[:known]] for known in range(END + 1)]
    args = engine_args((tmp_path / "target", drafter), async_scheduling=ahead, **MANY)
    for ignored in (False, True):
        with LLM(**args) as llm:
            wanted = [
                SamplingParams(max_tokens=NUM_TOKENS - known, ignore_eos=ignored, logprobs=0)
                for known in range(len(prompts))
            ]
            outputs = llm.generate(prompts, wanted)
            assert_counted(llm, outputs)
        for known, output in enumerate(outputs):
            if ignored:
                assert_ends(output, plain[known:], "length")
            else:
                assert_ends(output, plain[known : END + 1], "stop")


@BOTH
@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_the_end_of_the_context_is_reached_exactly(
    trained: PairMaker,
    monkeypatch: pytest.MonkeyPatch,
    plain: tuple[int, ...],
    wrong: float,
    ahead: bool,
) -> None:
    """Prompts that leave room for one token, for less than a block and for more."""
    sequence = [*PROMPT, *plain]
    foresee(monkeypatch, {0: sequence}, wrong)
    max_model_len = len(sequence)
    args = engine_args(trained("qwen3"), **MANY) | {"max_model_len": max_model_len}
    rooms = range(1, NUM_TOKENS + 1)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    with LLM(**args, async_scheduling=ahead) as llm:
        outputs = llm.generate([sequence[:-room] for room in rooms], sampling)
        for too_long in (sequence, [*sequence, 7]):
            with pytest.raises(RequestRejected, match=f"the limit is {max_model_len - 1}"):
                llm.generate([too_long], sampling)
        assert_counted(llm, outputs)
    for output, room in zip(outputs, rooms, strict=True):
        assert (output.token_ids, output.finish_reason) == (plain[-room:], "length")
