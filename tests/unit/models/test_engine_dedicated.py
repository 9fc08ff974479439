"""The whole engine with dedicated drafters, over processes: the same tokens and acceptance as with
colocated ones, and losses that cost speed only."""

import itertools
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from actors.config import EngineConfig
from actors.engine import Engine, ShardGroup
from actors.messages import (
    GenerateRequest,
    Guide,
    SamplingParams,
    SpeculationStats,
    TokenChunk,
    decode_plan,
)
from actors.shard import Shard
from actors.stats import EngineStats
from tests.unit.models.conftest import PROMPT, Pair, PairMaker
from tests.unit.models.processes import DedicatedShards, RankProcesses
from tests.unit.models.test_engine_oracle import ENGINE, PROMPTS

END = 258  # <|im_end|>
LONG = 60  # tokens


class Spare:
    """Processes for drafters: the same again, until a test has killed them."""

    def __init__(self) -> None:
        self._made: list[RankProcesses] = []
        self._fit: list[RankProcesses] = []

    def take(self) -> RankProcesses:
        if not self._fit:
            self._fit.append(RankProcesses(2))
            self._made += self._fit
        return self._fit.pop()

    def give_back(self, processes: RankProcesses) -> None:
        self._fit.append(processes)

    def close(self) -> None:
        for processes in self._made:
            processes.close()


@pytest.fixture(scope="module")
def spare() -> Iterator[Spare]:
    spare = Spare()
    try:
        yield spare
    finally:
        spare.close()


@pytest.fixture(scope="module")
def ending(trained: PairMaker, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A trained pair whose target has an end token, which guides need."""
    target, drafter = trained("qwen3")
    directory = tmp_path_factory.mktemp("ending")
    shutil.copytree(target, directory, dirs_exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return directory, drafter


def config_of(
    pair: Pair,
    drafter_size: int | None,
    size: int = 2,
    overlap: str = "auto",
    **changes: Any,
) -> EngineConfig:
    """`drafter_size` None is colocated."""
    speculative = {"method": "dflash", "model": str(pair[1]), "adaptive": False}
    if drafter_size is not None:
        speculative |= {
            "placement": "dedicated",
            "tensor_parallel_size": drafter_size,
            "overlap": overlap,
        }
    args = {"model": str(pair[0]), "speculative_config": speculative, "tensor_parallel_size": size}
    return EngineConfig.resolve({**args, **ENGINE, "exchange_timeout_s": 20.0, **changes})


Result = dict[str, tuple[tuple[int, ...], str | None, SpeculationStats]]
# What a test does in front of an engine's steps.
Meddle = Callable[[int, Engine], None]


def driven(
    config: EngineConfig,
    shards: ShardGroup,
    messages: Sequence[GenerateRequest],
    meddle: Meddle = lambda step, engine: None,
) -> tuple[Result, EngineStats]:
    """What each request got of an engine of these shards, which are closed behind it."""
    chunks: list[TokenChunk] = []
    engine = Engine(config, shards, chunks.extend)
    try:
        engine.add_all(messages)
        for number in itertools.count():
            meddle(number, engine)
            if not engine.step():
                break
        engine.scheduler.check_idle()
    finally:
        engine.close()
        shards.close()
    return results(chunks), engine.scheduler.stats


def colocated_run(
    pair: Pair, messages: Sequence[GenerateRequest], **changes: Any
) -> tuple[Result, EngineStats]:
    """On one rank in this process."""
    config = config_of(pair, None, size=1, **changes)
    shard = Shard(config, rank=0)
    shard.load()
    return driven(config, shard, messages)


def results(chunks: Sequence[TokenChunk]) -> Result:
    found: Result = {}
    for chunk in chunks:
        before = found.get(chunk.request_id, ((),))[0]
        tokens = (*before, *chunk.token_ids)
        found[chunk.request_id] = tokens, chunk.finish_reason, chunk.speculation
    return found


def request(name: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> GenerateRequest:
    fields = {"max_tokens": 20, "ignore_eos": True, **fields}
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**fields)
    )


def mixed() -> list[GenerateRequest]:
    """Greedy, seeded, shaped and guided ones, more than run at once, some of one beginning."""
    words = Guide(kind="regex", source="([a-z]{3,7} ){2}[a-z]{3,7}")
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "seed": 6, "top_k": 20, "top_p": 0.9},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"guide": words, "ignore_eos": False},
        {"guide": words, "ignore_eos": False, "temperature": 0.8, "seed": 7},
        {"logprobs": 2, "prompt_logprobs": 0},
    ]
    prompts = itertools.cycle([*PROMPTS, PROMPT * 3])
    return [
        request(str(i), prompt, **each)
        for i, (each, prompt) in enumerate(zip(fields + fields[:1], prompts, strict=False))
    ]


TIGHT = {"num_kv_pages": 25, "max_num_seqs": 6}
COLD = {"enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("size", "drafter_size", "ahead", "changes"),
    [
        (2, 1, False, {}),
        (2, 1, True, {}),
        (2, 1, True, TIGHT),
        (2, 1, False, COLD),
        (1, 2, True, {}),
        (1, 2, False, TIGHT),
    ],
)
def test_dedicated_is_as_colocated(
    ending: Pair,
    rank_processes: RankProcesses,
    spare: Spare,
    size: int,
    drafter_size: int,
    ahead: bool,
    changes: dict[str, Any],
) -> None:
    """Tokens, and how many drafts were verified and accepted, of every request and in all."""
    changes = {**changes, "async_scheduling": ahead}
    expected, stats = colocated_run(ending, mixed(), **changes)
    assert (stats.preemptions > 0) == ("num_kv_pages" in changes)
    assert (stats.prefix_cache_hits > 0) == (changes.keys() == {"async_scheduling"})

    config, drafters = config_of(ending, drafter_size, size, **changes), spare.take()
    shards = DedicatedShards(rank_processes, drafters, config)
    found, found_stats = driven(config, shards, mixed())
    spare.give_back(drafters)
    assert found == expected
    assert found_stats == stats
    assert found_stats.accepted_tokens > 0
    assert shards.drafters.num_losses == 0


@pytest.mark.parametrize(("size", "drafter_size"), [(2, 1), (1, 2)])
def test_overlapped_halves_are_as_colocated(
    ending: Pair, rank_processes: RankProcesses, spare: Spare, size: int, drafter_size: int
) -> None:
    """Tokens, steps and accepted drafts; drafts near a request's end may be verified in vain."""
    messages = [message for message in mixed() if message.sampling.guide is None]
    expected, _ = colocated_run(ending, messages, **COLD)
    drafters = spare.take()
    config = config_of(ending, drafter_size, size, overlap="always", **COLD)
    shards = Counting(DedicatedShards(rank_processes, drafters, config))
    found, _ = driven(config, shards, messages)
    spare.give_back(drafters)
    assert plain_of(found) == plain_of(expected)
    for name, (_, _, speculation) in found.items():
        alike = expected[name][2]
        assert speculation.verify_steps == alike.verify_steps
        assert speculation.accepted_tokens == alike.accepted_tokens
    assert shards.num_deferred > shards.num_steps / 2


class Counting:
    """Shards whose steps are counted, and those that defer their drafts."""

    def __init__(self, shards: DedicatedShards) -> None:
        self._shards = shards
        self.drafters = shards.drafters
        self.seal, self.close = shards.seal, shards.close
        self.num_steps = self.num_deferred = 0

    def step(self, payload: bytes) -> bytes:
        plan = decode_plan(payload)
        self.num_steps += bool(plan.rows)
        self.num_deferred += plan.defers_drafts
        return self._shards.step(payload)


def plain_of(found: Result) -> dict[str, Any]:
    return {name: (tokens, reason) for name, (tokens, reason, _) in found.items()}


@pytest.fixture(scope="module")
def colocated(ending: Pair) -> Callable[..., Result]:
    """What requests get of colocated drafters, each alone in an engine of its own."""
    known: dict[str, Result] = {}

    def results_of(messages: Sequence[GenerateRequest], ahead: bool) -> Result:
        found: Result = {}
        for message in messages:
            key = f"{message} {ahead}"
            if key not in known:
                known[key], _ = colocated_run(ending, [message], async_scheduling=ahead)
            found |= known[key]
        return found

    return results_of


def kill(shards: DedicatedShards) -> None:
    """As the kernel does, whatever they are at."""
    assert shards.drafters.joined is not None
    shards.drafters.joined.signal(0, signal.SIGKILL)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_drafters_killed_mid_stream_cost_speed_only(
    ending: Pair,
    rank_processes: RankProcesses,
    spare: Spare,
    colocated: Callable[..., Result],
    ahead: bool,
) -> None:
    """Killed once while two requests run, and again when another is drafted for. Pages that were
    computed meanwhile are of no use to drafters."""
    runs = [request("a", max_tokens=LONG), request("b", PROMPT[::-1], max_tokens=LONG)]
    lost = [request("c", PROMPT * 3, max_tokens=8)]
    back = [request("d", PROMPT * 3), request("e", PROMPT)]
    after = [request("f", [9, *PROMPT]), request("g", PROMPT * 3)]
    config = config_of(ending, 1, async_scheduling=ahead, max_num_seqs=6)
    shards = DedicatedShards(rank_processes, spare.take(), config)
    verified: dict[str, int] = {}

    def drafted(engine: Engine) -> int:
        return engine.scheduler.stats.draft_tokens

    def meddle(step: int, engine: Engine) -> None:
        drafters = shards.drafters
        match step:
            case 4:
                assert drafted(engine) > 0
                kill(shards)
            case 9:
                assert not engine.scheduler.has_drafter
                verified["lost"] = drafted(engine)
                engine.add_all(lost)
            case 17:
                assert drafted(engine) == verified["lost"], "nobody drafts"
                drafters.replace(spare.take())
            case 18:
                assert engine.scheduler.has_drafter
                assert drafted(engine) == verified["lost"], "those that run go on plainly"
                engine.add_all(back)
            case 24:
                assert drafted(engine) > verified["lost"]
                kill(shards)
            case 28:
                drafters.replace(spare.take())
            case 29:
                engine.add_all(after)

    found, stats = driven(config, shards, runs, meddle)
    assert stats.drafter_losses == 2
    assert (shards.drafters.num_joins, shards.drafters.num_losses) == (3, 2)
    everyone = [*runs, *lost, *back, *after]
    expected = colocated(everyone, ahead)
    assert plain_of(found) == plain_of(expected)
    for name in "fg":
        assert found[name][2] == expected[name][2], "as a cold one"
    assert found["c"][2].draft_tokens == 0
    for name in "abde":
        assert 0 < found[name][2].draft_tokens < expected[name][2].draft_tokens
    drafters = shards.drafters.joined
    assert drafters is not None
    spare.give_back(drafters)


def test_drafters_killed_while_idle_are_noticed_and_replaced(
    ending: Pair, rank_processes: RankProcesses, spare: Spare, colocated: Callable[..., Result]
) -> None:
    """In front of the next request, whose pages of an earlier one are of no use any more."""
    config = config_of(ending, 1)
    shards = DedicatedShards(rank_processes, spare.take(), config)
    chunks: list[TokenChunk] = []
    engine = Engine(config, shards, chunks.extend)
    try:
        for name in ("first", "lost", "back", "warm"):
            engine.add(request(name))
            while engine.step():
                pass
            if name == "first":
                kill(shards)
                while shards.drafters.are_joined():
                    pass
                assert not engine.step()
                assert not engine.scheduler.has_drafter
            if name == "lost":
                shards.drafters.replace(spare.take())
                assert not engine.step()
                assert engine.scheduler.has_drafter
        engine.scheduler.check_idle()
        cached = {chunk.request_id: chunk.cached_tokens for chunk in chunks if chunk.cached_tokens}
    finally:
        drafters = shards.drafters.joined
        engine.close()
        shards.close()
    assert drafters is not None
    spare.give_back(drafters)
    found = results(chunks)
    (expected,) = colocated([request("a")], True).values()
    assert [found[name] for name in ("first", "back", "warm")] == [expected] * 3
    assert found["lost"][:2] == expected[:2]
    assert found["lost"][2].draft_tokens == 0
    assert cached == {"lost": 8, "warm": 8}


def test_a_join_that_fails_leaves_the_target_as_it_was(
    ending: Pair, rank_processes: RankProcesses, spare: Spare, colocated: Callable[..., Result]
) -> None:
    """The engine begins without drafters, the first that come end before they are met."""
    config = config_of(ending, 2, size=1, exchange_timeout_s=4.0)
    shards = DedicatedShards(rank_processes, None, config)

    def meddle(step: int, engine: Engine) -> None:
        if step == 3:
            doomed = spare.take()
            shards.drafters.replace(doomed)
            doomed.signal(1, signal.SIGKILL)
        if step == 4:
            assert shards.drafters.num_losses == 1
            assert not engine.scheduler.has_drafter
        if step == 8:
            shards.drafters.replace(spare.take())
        if step == 9:
            assert engine.scheduler.has_drafter
            engine.add(request("b", PROMPT[::-1]))

    messages = [request("a", max_tokens=40)]
    found, stats = driven(config, shards, messages, meddle)
    assert stats.drafter_losses == 1, "those that never took part were not lost"
    expected = colocated([*messages, request("b", PROMPT[::-1])], True)
    assert plain_of(found) == plain_of(expected)
    assert found["a"][2].draft_tokens == 0
    assert found["b"] == expected["b"]


def test_a_long_step_of_the_target_is_no_loss(
    ending: Pair, rank_processes: RankProcesses, spare: Spare, colocated: Callable[..., Result]
) -> None:
    """It is the target that waits `exchange_timeout_s` at most; a prefill or a compile may take it
    longer than that until it comes to the exchange."""
    config, drafters = config_of(ending, 1, size=1, exchange_timeout_s=1.0), spare.take()
    shards = DedicatedShards(rank_processes, drafters, config)

    def meddle(step: int, engine: Engine) -> None:
        shards.drafters.delay_s = 2.0 if step == 1 else 0.0

    found, stats = driven(config, shards, [request("a")], meddle)
    assert stats.drafter_losses == 0
    assert found == colocated([request("a")], True)
    spare.give_back(drafters)
