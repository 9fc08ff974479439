"""Compiled regions on a tiny pair: as eager, once per shape, and in bfloat16 the same bits whatever
stands beside a row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.config import EngineConfig
from actors.engine import Engine
from actors.llm import LLM, RequestOutput
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from models.backends.cpu import CpuBackend
from models.ops import Grid
from models.steps import ModelRank
from tests.unit.models.conftest import PROMPT, Pair, PairMaker
from tests.unit.models.processes import ProcessShards, RankProcesses
from tests.unit.models.ranks import load_model_rank

PROMPTS = [PROMPT, PROMPT[::-1], [7], list(range(100, 137)), [250, 41] * 9]
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
K, PAGE = 4, 4


def args_of(pair: Pair, **changes: Any) -> dict[str, Any]:
    """One request at a time, in rows of one width: compiling a shape takes seconds."""
    return {
        "model": str(pair[0]),
        "speculative_config": {"method": "dflash", "model": str(pair[1])},
        "max_model_len": 96,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "block_size": PAGE,
        "dtype": "float32",
        "threads_per_shard": 1,
        "backend": "cpu",
        "late_compile": "error",
        "buckets": {"prefill_widths": [17]},
        # Then not only tokens but verify steps are the same whatever shares a batch.
        "async_scheduling": False,
    } | changes


def eager_tokens(pair: Pair) -> list[tuple[int, ...]]:
    with LLM(**args_of(pair, backend="eager")) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)]


@pytest.fixture(scope="module")
def warm(trained: PairMaker) -> Iterator[LLM]:
    """In float32, sealed: whatever it still had to compile would be an error."""
    with LLM(**args_of(trained("qwen3"))) as llm:
        llm.warm_up()
        yield llm


# ------------------------------------------------------------------------------ when it compiles


class CountingBackend(CpuBackend):
    """`compiled` has the shape of the first input of every graph that was compiled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, exact=True, **options)
        self.compiled: list[tuple[int, ...]] = []

    def _compile_graph(
        self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any
    ) -> Callable[..., Any]:
        compiled = super()._compile_graph(graph, inputs, **options)
        self.compiled.append(tuple(inputs[0].shape))
        return compiled

    def run(self, region: Callable[..., Tensor], *args: object) -> Tensor:
        return self.submit(lambda: region(*args)).result()


def scale_by(x: Tensor, factor: int) -> Tensor:
    return x * factor + 1


def test_a_region_is_compiled_once_for_each_shape_and_number() -> None:
    with closing(CountingBackend()) as backend:
        region = backend.compile(scale_by)
        for _ in range(2):
            for rows in (2, 3, 5):
                x = torch.arange(float(rows))
                assert torch.equal(backend.run(region, x, 2), 2 * x + 1)
        assert backend.compiled == [(2,), (3,), (5,)]
        assert torch.equal(backend.run(region, torch.ones(3), 7), torch.full((3,), 8.0))
        assert backend.compiled == [(2,), (3,), (5,), (3,)]


def test_a_late_compile_is_counted_and_right(caplog: pytest.LogCaptureFixture) -> None:
    with closing(CountingBackend()) as backend:
        region = backend.compile(scale_by)
        backend.run(region, torch.ones(2), 2)
        backend.seal()
        backend.run(region, torch.ones(2), 2)
        assert backend.late_compiles == 0
        for rows in (3, 4, 3):
            found = backend.run(region, torch.ones(rows), 2)
            assert torch.equal(found, torch.full((rows,), 3.0))
        assert backend.late_compiles == 2
        assert "compiled after warm-up" in caplog.text
        assert "(3,)" in caplog.text


def test_a_late_compile_is_an_error_where_it_is_strict() -> None:
    with closing(CountingBackend(strict=True)) as backend:
        region = backend.compile(scale_by)
        backend.run(region, torch.ones(2), 2)
        backend.seal()
        with pytest.raises(RuntimeError, match=r"compiled after warm-up, for inputs \[\(3,\)"):
            backend.run(region, torch.ones(3), 2)
        assert torch.equal(backend.run(region, torch.ones(2), 2), torch.full((2,), 3.0))


def test_what_cannot_be_one_graph_is_an_error() -> None:
    def reads_back(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x

    with closing(CountingBackend()) as backend:
        region = backend.compile(reads_back)
        with pytest.raises(RuntimeError):
            backend.run(region, torch.ones(2))


def test_backends_do_not_find_each_others_code() -> None:
    """Guards know nothing of what a region closes over, so that code of another would be taken."""

    class Scale:
        def __init__(self, weight: float) -> None:
            self.weight = torch.full((2,), weight)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    with closing(CountingBackend(strict=True)) as one, closing(CountingBackend()) as other:
        first, second = one.compile(Scale(2.0).forward), other.compile(Scale(3.0).forward)
        third = one.compile(Scale(5.0).forward)
        for _ in range(2):
            for backend, region, factor in ((one, first, 2), (other, second, 3), (one, third, 5)):
                assert backend.run(region, torch.ones(2)).tolist() == [factor] * 2
            one.seal()
        assert (len(one.compiled), len(other.compiled)) == (2, 1)
        backend_results = other.run(second, torch.ones(1))
        assert backend_results.tolist() == [3.0, 3.0], "the other's seal is not its own"


# ----------------------------------------------------------------------------- in whole engines


def test_tokens_are_those_of_eager_and_nothing_is_compiled_late(
    trained: PairMaker, warm: LLM
) -> None:
    expected = eager_tokens(trained("qwen3"))
    assert [output.token_ids for output in warm.generate(PROMPTS, SAMPLING)] == expected
    assert warm.stats.accepted_tokens > 0
    assert warm.stats.late_compiles == 0


def test_a_sealed_engine_that_meets_a_new_shape_counts_it(trained: PairMaker) -> None:
    pair = trained("qwen3")
    with LLM(**args_of(pair, late_compile="log", speculative_config=None)) as llm:
        llm._shard.seal()
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, ignore_eos=True))
        assert output.token_ids == eager_tokens(pair)[0][:1]
        assert llm.stats.late_compiles > 0


def test_engines_in_one_process_do_not_disturb_each_other(
    pair: PairMaker, trained: PairMaker, warm: LLM
) -> None:
    """Another pair of the same shapes is loaded and compiled while the first is sealed."""
    mine, others = eager_tokens(trained("qwen3")), eager_tokens(pair("qwen3", seed=5))
    assert mine != others
    with LLM(**args_of(pair("qwen3", seed=5))) as other:
        for _ in range(2):
            for llm, expected in ((other, others), (warm, mine)):
                outputs = llm.generate(PROMPTS[:3], SAMPLING)
                assert [output.token_ids for output in outputs] == expected[:3]
    outputs = warm.generate(PROMPTS[:3], SAMPLING)
    assert [output.token_ids for output in outputs] == mine[:3]


def shown(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    """Tokens, and through what was accepted, drafts."""
    return [(output.token_ids, output.speculation) for output in outputs]


def test_bfloat16_gives_the_same_in_every_batch_chunk_and_bucket(trained: PairMaker) -> None:
    """Two requests at a time, in any order; or one, in other rows."""
    args = args_of(trained("qwen3"), dtype="bfloat16")
    two = {"max_num_seqs": 2, "buckets": {"decode_sequences": [2], "prefill_widths": [17]}}
    with LLM(**(args | two)) as llm:
        assert llm.config.exact
        alone = [llm.generate([prompt], SAMPLING)[0] for prompt in PROMPTS]
        expected = shown(alone)
        assert shown(llm.generate(PROMPTS, SAMPLING)) == expected
        llm._shard.seal()
        assert shown(llm.generate(PROMPTS[::-1], SAMPLING)) == expected[::-1]
        assert shown(llm.generate(PROMPTS * 2, SAMPLING)) == expected * 2
        assert llm.stats.accepted_tokens > 0
    wide = {"max_num_batched_tokens": 29, "buckets": {"prefill_widths": [31]}}
    with LLM(**(args | wide)) as llm:
        assert shown(llm.generate(PROMPTS, SAMPLING)) == expected


def test_two_ranks_give_the_tokens_of_one(
    trained: PairMaker, warm: LLM, rank_processes: RankProcesses
) -> None:
    expected = [output.token_ids for output in warm.generate(PROMPTS[:3], SAMPLING)]
    config = EngineConfig.resolve(args_of(trained("qwen3"), tensor_parallel_size=2))
    shards = ProcessShards(rank_processes, config)
    chunks: list[TokenChunk] = []
    try:
        engine = Engine(config, shards, chunks.extend)
        requests = [
            GenerateRequest(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=SAMPLING)
            for i, prompt in enumerate(PROMPTS[:3])
        ]
        engine.add_all(requests)
        while engine.step():
            pass
        shards.seal()
        engine.add(requests[0])
        while engine.step():
            pass
    finally:
        shards.close()
    for i, tokens in enumerate(expected):
        mine = [chunk for chunk in chunks if chunk.request_id == str(i)]
        found = tuple(token for chunk in mine for token in chunk.token_ids)
        assert found == tokens * (2 if i == 0 else 1)
    assert engine.scheduler.stats.late_compiles == 0


# -------------------------------------------------------------------------------- hidden states


@pytest.fixture(scope="module")
def exact_rank(trained: PairMaker) -> Iterator[tuple[CpuBackend, ModelRank]]:
    """The pair in bfloat16, compiled, driven by hand."""
    with closing(CpuBackend(1, exact=True)) as backend:
        work = lambda: load_model_rank(  # noqa: E731
            *trained("qwen3"), page_size=PAGE, dtype=torch.bfloat16, backend=backend
        )
        yield backend, backend.submit(work).result()


Row = tuple[int, list[int], int]  # slot, tokens, first position


def feed(rank: ModelRank, rows: Sequence[Row], num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Hidden and captured states of each row, in one step of `num_tokens`; injected."""
    grids = []
    tokens, positions, cache_slots = [], [], []
    for slot, ids, start in rows:
        where = torch.arange(start, start + len(ids), dtype=torch.int32)
        valid = torch.ones(1, len(ids), dtype=torch.bool)
        grids.append(Grid(torch.tensor([slot], dtype=torch.int32), where[None], valid))
        table = rank.state.block_table[slot]
        tokens.append(torch.tensor(ids, dtype=torch.int32))
        positions.append(where)
        cache_slots.append(table[where // PAGE] * PAGE + where % PAGE)
    sizes = [len(ids) for _, ids, _ in rows]
    padding = torch.zeros(num_tokens - sum(sizes), dtype=torch.int32)
    flat = [torch.cat([*parts, padding]) for parts in (tokens, positions, cache_slots)]
    target, table = rank.target, rank.state.block_table
    context = target.ops.causal_context(table, grids, PAGE, table.shape[1], num_tokens)
    hidden, aux = target(*flat, context, rank.target_kv, rank.regions.run_layers)
    assert rank.drafting is not None
    rank.drafting.inject(aux, flat[1], flat[2], rank.drafting.kv)
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    return [(hidden[span].clone(), aux[span].clone()) for span in spans]


def pages_of(rank: ModelRank, slot: int, length: int) -> list[Tensor]:
    """The slot's keys and values in every layer, target and drafter."""
    positions = torch.arange(length)
    pages = rank.state.block_table[slot][positions // PAGE].long()
    assert rank.drafting is not None
    layers = (*rank.target_kv, *rank.drafting.kv)
    return [pool[pages, positions % PAGE].clone() for kv in layers for pool in (kv.k, kv.v)]


OTHER = PROMPT[::-1]
ARRANGEMENTS: dict[str, list[tuple[int, list[Row]]]] = {
    "padded": [(40, [(0, PROMPT, 0)])],
    "one by one": [(2, [(0, [token], i)]) for i, token in enumerate(PROMPT)],
    "chunks": [(2, [(0, PROMPT[:2], 0)]), (40, [(0, PROMPT[2:], 2)])],
    "rows of one step": [(40, [(0, PROMPT[7:], 7), (0, PROMPT[:7], 0)])],
    "in company": [(40, [(1, OTHER, 0), (0, PROMPT, 0), (2, [7, 8], 0)])],
    "behind others": [(40, [(1, OTHER * 2, 0)]), (40, [(2, OTHER, 0), (0, PROMPT, 0)])],
}


@pytest.mark.parametrize("name", list(ARRANGEMENTS)[1:])
def test_hidden_states_are_the_same_bits(
    exact_rank: tuple[CpuBackend, ModelRank], name: str
) -> None:
    """And what target and drafter keep of them."""
    backend, rank = exact_rank

    def run(steps: list[tuple[int, list[Row]]]) -> list[Tensor]:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for num_tokens, rows in steps:
            for (slot, _, start), states in zip(rows, feed(rank, rows, num_tokens), strict=True):
                if slot == 0:
                    found[start] = states
        parts = [found[start] for start in sorted(found)]
        states = [torch.cat([part[i] for part in parts]) for i in range(2)]
        return [*states, rank.target.logits(states[0]), *pages_of(rank, 0, len(PROMPT))]

    expected = backend.submit(lambda: run(ARRANGEMENTS["padded"])).result()
    found = backend.submit(lambda: run(ARRANGEMENTS[name])).result()
    assert expected[0].shape == (len(PROMPT), 32)
    assert all(tensor.isfinite().all() and tensor.any() for tensor in expected)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(other, one)


def test_draft_blocks_are_the_same_bits(exact_rank: tuple[CpuBackend, ModelRank]) -> None:
    backend, rank = exact_rank
    drafting = rank.drafting
    assert drafting is not None
    drafter = drafting.drafter
    mask = drafter.config.mask_token_id
    lens = [len(PROMPT), 5, 0]

    def run(slots: list[int]) -> tuple[Tensor, Tensor]:
        block, table = drafter.config.block_size, rank.state.block_table
        where = torch.tensor(slots, dtype=torch.int32)
        some = torch.tensor([lens[slot] for slot in slots], dtype=torch.int32)
        context = drafter.ops.block_context(table, where, some, block, PAGE, table.shape[1])
        blocks = torch.tensor([[3 + slot, *[mask] * K] for slot in slots], dtype=torch.int32)
        hidden = drafting.block_hidden(blocks, some, context, drafting.kv)
        return hidden.clone(), drafter.draft_logits(hidden, K)

    def work() -> None:
        feed(rank, [(0, PROMPT, 0), (1, OTHER, 0)], 40)
        alone = [run([slot]) for slot in range(3)]
        assert not torch.equal(alone[0][0], alone[1][0])
        for slots in ([0, 1, 2], [2, 0, 1], [1, 1, 1]):
            for part, both in enumerate(zip(*(alone[slot] for slot in slots), strict=True)):
                assert torch.equal(run(slots)[part], torch.cat(both))

    backend.submit(work).result()


def test_hidden_states_are_near_those_of_plain_torch(
    trained: PairMaker, exact_rank: tuple[CpuBackend, ModelRank]
) -> None:
    """In numbers rather than in decisions; bfloat16 against float32."""
    backend, rank = exact_rank
    plain = load_model_rank(*trained("qwen3"), page_size=PAGE)
    num_tokens, rows = ARRANGEMENTS["in company"][0]
    found = backend.submit(lambda: feed(rank, rows, num_tokens)).result()
    with torch.inference_mode():
        expected = feed(plain, rows, num_tokens)
    pairs = [both for row in zip(found, expected, strict=True) for both in zip(*row, strict=True)]
    for slot, ids, _ in rows:
        kept = pages_of(rank, slot, len(ids)), pages_of(plain, slot, len(ids))
        pairs += zip(*kept, strict=True)
    for one, other in pairs:
        error = (one.float() - other).norm() / other.norm()
        assert error < 0.03
