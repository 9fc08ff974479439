"""The whole engine on tiny pairs: what is cached, shared or computed again changes no token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.llm import LLM, RequestOutput
from actors.messages import SamplingParams
from tests.unit.models.conftest import PROMPT, Pair, PairMaker

ENGINE: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "dtype": "float32",
    "threads_per_shard": 1,
    "backend": "eager",
}
SAMPLING = SamplingParams(max_tokens=30, ignore_eos=True)


def engine(pair: Pair, **changes: Any) -> LLM:
    speculative = {"method": "dflash", "model": str(pair[1])}
    args = {"model": str(pair[0]), "speculative_config": speculative, **ENGINE, **changes}
    return LLM(**args)


def results(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [(output.token_ids, output.finish_reason, output.speculation) for output in outputs]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_cached_is_cold(trained: PairMaker, ahead: bool) -> None:
    """Tokens and acceptance: the drafter's context comes back with the target's."""
    prompts = [PROMPT, PROMPT[::-1], PROMPT * 3]
    with engine(trained("qwen3"), async_scheduling=ahead) as llm:
        cold = [llm.generate([prompt], SAMPLING)[0] for prompt in prompts]
        warm = [llm.generate([prompt], SAMPLING)[0] for prompt in prompts]
    with engine(trained("qwen3"), async_scheduling=ahead, enable_prefix_caching=False) as llm:
        never = [llm.generate([prompt], SAMPLING)[0] for prompt in prompts * 2]
    assert [output.cached_tokens for output in cold] == [0, 0, 8]
    assert [output.cached_tokens for output in warm] == [8, 8, 32]
    assert {output.cached_tokens for output in never} == {0}
    assert results(cold) == results(warm)
    assert results(cold) + results(warm) == results(never)
    assert max(output.speculation.mean_acceptance_length or 0 for output in warm) > 1.5


def test_a_conversation_goes_on_from_its_last_answer(trained: PairMaker) -> None:
    with engine(trained("qwen3")) as llm:
        (first,) = llm.generate([PROMPT], SAMPLING)
        following = [*PROMPT, *first.token_ids, 17, 4]
        (warm,) = llm.generate([following], SAMPLING)
    with engine(trained("qwen3")) as llm:
        (cold,) = llm.generate([following], SAMPLING)
    # The last token of an answer is not fed: 40 of 41 are.
    assert (warm.cached_tokens, cold.cached_tokens) == (40, 0)
    assert results([warm]) == results([cold])


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_requests_that_share_a_prefix_do_not_disturb_each_other(
    trained: PairMaker, ahead: bool
) -> None:
    prompts = [[*PROMPT * 4, 50 + i] for i in range(3)]
    with engine(trained("qwen3"), async_scheduling=ahead) as llm:
        if ahead:
            llm.generate([PROMPT * 4], SamplingParams(max_tokens=1))
        together = llm.generate(prompts, SAMPLING)
        llm._engine.scheduler.check_idle()
    # Without that, the first prompt fills a step, which is read before the others start.
    assert [output.cached_tokens for output in together] == ([44] * 3 if ahead else [0, 32, 32])
    with engine(trained("qwen3"), enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], SAMPLING)[0] for prompt in prompts]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize("speculation", [True, False], ids=["speculative", "plain"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("caching", [False, True], ids=["", "caching"])
def test_a_pool_a_quarter_of_what_is_needed_changes_no_token(
    trained: PairMaker, speculation: bool, ahead: bool, caching: bool
) -> None:
    """16 requests of up to 11 pages each, and 44 pages there are."""
    changes: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
        "async_scheduling": ahead,
        "enable_prefix_caching": caching,
        **({} if speculation else {"speculative_config": None}),
    }
    prompts = [[40 + i, *PROMPT] if i % 2 else [*PROMPT, 40 + i] for i in range(16)]
    with engine(trained("qwen3"), **changes) as llm:
        ample = llm.generate(prompts, SAMPLING)
        assert llm.stats.preemptions == 0
    with engine(trained("qwen3"), num_kv_pages=45, **changes) as llm:
        tight = llm.generate(prompts, SAMPLING)
        assert llm.stats.preemptions > 0
        llm._engine.scheduler.check_idle()
    assert [o.token_ids for o in tight] == [o.token_ids for o in ample]
    assert {o.finish_reason for o in tight} == {"length"}


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_a_drafter_of_fewer_positions_stops_there(
    trained: PairMaker, tmp_path: Path, ahead: bool
) -> None:
    target, drafter = trained("qwen3")
    shutil.copytree(drafter, tmp_path / "short")
    config = tmp_path / "short" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "max_position_embeddings": 40}))
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    outputs = {}
    for name, path in {"whole": drafter, "short": tmp_path / "short"}.items():
        with engine((target, path), async_scheduling=ahead) as llm:
            outputs[name] = llm.generate([PROMPT, PROMPT * 4], sampling)
    for whole, short in zip(outputs["whole"], outputs["short"], strict=True):
        assert short.token_ids == whole.token_ids
        assert short.speculation.draft_tokens < whole.speculation.draft_tokens
    inside, behind = outputs["short"]
    assert inside.speculation.draft_tokens > 0
    assert behind.speculation.draft_tokens == 0
