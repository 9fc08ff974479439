"""No feature excludes another: whatever shares an engine's steps and pages, a request gets what it
gets alone, without speculation, caching or want of pages."""

import json
import random
import shutil
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest

from actors.config import EngineConfig
from actors.delivery import joined
from actors.engine import Engine
from actors.llm import LLM, RequestOutput
from actors.messages import (
    GenerateRequest,
    Guide,
    SamplingParams,
    StepPlan,
    TokenChunk,
    TokenLogprobs,
    decode_plan,
)
from actors.seeds import choice_seed
from actors.shard import Shard
from actors.stats import EngineStats
from tests.unit.models.conftest import PROMPT, Pair, PairMaker
from tests.unit.models.foresight import foresee
from tests.unit.models.test_engine_oracle import engine_args, random_row

NUM_CROWDS, NUM_REQUESTS, NUM_DRAFTS = 3, 40, 4
# Each may come to need 24 pages, and 36 there are.
CROWDED: dict[str, Any] = {
    "max_num_seqs": 6,
    "num_kv_pages": 37,
    "buckets": {"prefill_widths": [4, 16]},
}
ALONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "speculative_config": None,
    "async_scheduling": False,
    "enable_prefix_caching": False,
}
STEMS = [PROMPT, PROMPT * 3, list(range(100, 137)), [250, 41] * 9]
END = 258  # <|im_end|>


@pytest.fixture(scope="module")
def ending(trained: PairMaker, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A trained pair whose target has an end token, which guides need."""
    target, drafter = trained("qwen3")
    directory = tmp_path_factory.mktemp("ending")
    shutil.copytree(target, directory, dirs_exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return directory, drafter


def random_sampling(rng: random.Random) -> SamplingParams:
    """A quarter asks for nothing but tokens; of the others each asks for some of all there is."""
    max_tokens = rng.randint(1, 40)
    # Where few tokens are likely they repeat, and what acts on what was output acts often.
    few = rng.sample(range(300), 5)
    some: dict[str, Any] = {
        "temperature": rng.choice((0.3, 0.7, 1.0)),
        "top_p": rng.choice((0.5, 0.9)),
        "top_k": rng.choice((2, 20)),
        "min_p": rng.choice((0.01, 0.2)),
        "presence_penalty": rng.choice((-0.5, 1.5)),
        "frequency_penalty": rng.choice((-0.2, 0.5, 2.0)),
        "repetition_penalty": rng.choice((0.8, 1.3)),
        "logit_bias": tuple((token, rng.uniform(4, 10)) for token in few),
        "bad_words": ((few[0],), tuple(few[1:3]), (few[2], few[2]), tuple(few[1:4])),
        "stop_token_ids": (few[4], *range(rng.randrange(20))),
        "min_tokens": rng.randint(1, max_tokens),
        "logprobs": rng.choice((0, 3)),
        "prompt_logprobs": rng.choice((0, 2)),
        "choice": rng.choice((1, 2)),
        "guide": Guide(kind="regex", source=rng.choice(("[a-f]{8,30}", "(one|two|three|, )+"))),
    }
    asked = rng.sample(sorted(some), rng.randint(1, 9)) if rng.random() < 0.75 else []
    return SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(64) - 2**63,
        **{name: some[name] for name in asked},
    )


def random_requests(rng: random.Random) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=(*rng.choice(STEMS), *rng.sample(range(300), rng.randrange(8))),
            sampling=random_sampling(rng),
            priority=rng.choice((-1, 0, 0, 0, 1)),
            cache_salt=rng.choice(("", "", "", "", "salt")),
            max_draft_tokens=rng.choice((None, None, 0, 1)),
        )
        for i in range(NUM_REQUESTS)
    ]


def seed_of(request: GenerateRequest) -> int:
    return choice_seed(request.sampling.seed, request.sampling.choice)


class WatchedShard(Shard):
    """Keeps the plans it gets."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, rank=0)
        self.plans: list[StepPlan] = []

    def step(self, payload: bytes) -> bytes:
        self.plans.append(decode_plan(payload))
        return super().step(payload)


@dataclass(kw_only=True)
class Crowd:
    """What requests got in one engine, and how they fared there."""

    chunks: list[TokenChunk]
    plans: list[StepPlan]
    stats: EngineStats


def generated_together(
    pair: Pair, requests: Sequence[GenerateRequest], seed: int, *, is_async: bool
) -> Crowd:
    """They come, and some are aborted, at random steps; a random row is left out of each, which
    drafts as many tokens as chance wants."""
    rng = random.Random(seed)
    config = EngineConfig.resolve(engine_args(pair, **CROWDED, async_scheduling=is_async))
    shard, chunks, to_come = WatchedShard(config), list[TokenChunk](), deque(requests)
    shard.load()
    try:
        engine = Engine(config, shard, chunks.extend, leave_out=random_row(seed))
        chooser = engine.scheduler.speculation
        chooser.choose = lambda rows: rng.choice((0, 1, 4, 4))  # type: ignore[method-assign]
        while engine.step() or to_come:
            while to_come and rng.random() < 0.3:
                engine.add(to_come.popleft())
            if rng.random() < 0.02:
                engine.abort(rng.choice(requests).request_id)
        engine.scheduler.check_idle()
    finally:
        shard.close()
    return Crowd(chunks=chunks, plans=shard.plans, stats=engine.scheduler.stats)


def generated_alone(pair: Pair, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
    with LLM(**engine_args(pair, **ALONE)) as llm:
        return llm.generate(
            [request.prompt_token_ids for request in requests],
            [request.sampling for request in requests],
            max_in_flight=1,
        )


def assert_close(
    found: Sequence[TokenLogprobs | None], wanted: Sequence[TokenLogprobs | None]
) -> None:
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        # Otherwise rounded, another token may be as probable.
        assert one.rank == pytest.approx(other.rank, abs=1)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        values = [value for _, value in other.top]
        assert [value for _, value in one.top] == pytest.approx(values, abs=1e-4)


def test_a_request_gets_in_a_crowd_what_it_gets_alone(
    ending: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the requests have a drafter that is mostly right, in every third crowd steps are
    read before the next is planned."""
    requests: list[GenerateRequest] = []
    crowds: list[Crowd] = []
    for seed in range(NUM_CROWDS):
        some = random_requests(random.Random(seed))
        pairs = list(zip(some, generated_alone(ending, some), strict=True))
        known = {
            seed_of(request): [*request.prompt_token_ids, *alone.token_ids]
            for request, alone in pairs[::2]
        }
        with monkeypatch.context() as patch:
            foresee(patch, known, wrong=0.2)
            crowd = generated_together(ending, some, seed, is_async=seed % 3 > 0)
        for request, alone in pairs:
            mine = [chunk for chunk in crowd.chunks if chunk.request_id == request.request_id]
            if mine:
                assert_as_alone(request, reduce(joined, mine), alone)
        assert crowd.stats.requests.total() == NUM_REQUESTS
        finished = [chunk for chunk in crowd.chunks if chunk.finish_reason is not None]
        assert len(finished) == NUM_REQUESTS - crowd.stats.requests["abort"]
        requests += some
        crowds.append(crowd)
    assert_crowded(requests, crowds)


def assert_as_alone(request: GenerateRequest, found: TokenChunk, alone: RequestOutput) -> None:
    """`found` is all a request got, which is less where it was aborted."""
    count = len(found.token_ids)
    assert found.token_ids == alone.token_ids[:count], request
    if found.finish_reason is not None:
        assert (count, found.finish_reason) == (len(alone.token_ids), alone.finish_reason), request
    assert_close(found.logprobs, alone.logprobs[:count])
    assert_close(found.prompt_logprobs, alone.prompt_logprobs)
    speculation = found.speculation
    if request.max_draft_tokens is not None:
        most = request.max_draft_tokens * speculation.verify_steps
        assert speculation.draft_tokens <= most


def assert_crowded(requests: Sequence[GenerateRequest], crowds: Sequence[Crowd]) -> None:
    """That what could go wrong had occasion to."""
    assert any(crowd.stats.requests["abort"] for crowd in crowds)
    assert any(crowd.stats.requests["stop"] for crowd in crowds)
    assert all(crowd.stats.accepted_at[NUM_DRAFTS - 1] for crowd in crowds)
    samplings = [each for crowd in crowds for plan in crowd.plans for each in plan.samplings]
    # Tokens that choices depend on came from cached pages, those of a prompt and of an output.
    assert any(0 < len(each.history) <= each.prompt_len for each in samplings)
    assert any(len(each.history) > each.prompt_len for each in samplings)
    starts = Counter(each.seed for each in samplings)
    again = [request.sampling for request in requests if starts[seed_of(request)] > 1]
    assert any(sampling.frequency_penalty and sampling.bad_words for sampling in again)
    assert any(sampling.prompt_logprobs is not None for sampling in again)
    assert any(sampling.guide is not None for sampling in again)
