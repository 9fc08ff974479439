"""The engine in this process, on the demo pair: however requests are mixed, tokens stay the same.

Engines are compared with each other bit by bit in what they emit, near-ties excused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from actors.config import EngineConfig
from actors.engine import Engine
from actors.errors import RequestRejected
from actors.llm import LLM
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from actors.shard import Shard
from models import hub
from tests.integration.demo import assert_same_tokens, demo_args, short_prompts
from tests.oracle.dflash_reference import make_random_drafter

MAX_TOKENS = 20
K = 9


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    return short_prompts(plain, 8)


@pytest.fixture(scope="module")
def alone(plain: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Every prompt's tokens, decoded plainly and one request at a time."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [plain.generate([prompt], sampling)[0].token_ids for prompt in prompts]


Compare = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], None]


@pytest.fixture(scope="module")
def assert_equal(plain: LLM, prompts: list[list[int]]) -> Compare:
    """Compares outputs of `prompts`, in order."""

    def compare(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
        assert len(found) == len(expected)
        for ours, theirs, prompt in zip(found, expected, prompts, strict=False):
            assert_same_tokens(ours, theirs, prompt, plain.next_token_logits)

    return compare


class SpyShard(Shard):
    """Keeps the sizes of what it was sent and what it answered."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, rank=0)
        self.sizes: list[tuple[int, int]] = []

    def step(self, payload: bytes) -> bytes:
        answer = super().step(payload)
        self.sizes.append((len(payload), len(answer)))
        return answer


class Stepped:
    """An engine that a test steps by hand; `calls` has the chunks of every step."""

    def __init__(self, **changes: Any) -> None:
        config = EngineConfig.resolve(demo_args(**changes))
        self.shard = SpyShard(config)
        self.shard.load()
        self.calls: list[list[TokenChunk]] = []
        self.engine = Engine(config, self.shard, self.calls.append)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> None:
        self.engine.add(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            )
        )

    def finish(self) -> None:
        while self.engine.step():
            pass
        self.engine.scheduler.check_idle()

    def tokens(self, request_id: str) -> list[int]:
        chunks = [c for call in self.calls for c in call if c.request_id == request_id]
        return [token for chunk in chunks for token in chunk.token_ids]


@contextmanager
def stepped(**changes: Any) -> Iterator[Stepped]:
    engine = Stepped(**changes)
    try:
        yield engine
    finally:
        engine.shard.close()


def test_eight_requests_together_equal_one_at_a_time(
    prompts: list[list[int]], alone: list[tuple[int, ...]], assert_equal: Compare
) -> None:
    with stepped() as run:
        for i, prompt in enumerate(prompts):
            run.add(str(i), prompt)
        run.finish()
        assert_equal([run.tokens(str(i)) for i in range(8)], alone)
        pool = run.engine.scheduler.pool
        assert pool.num_free == pool.num_usable
        assert max(len(call) for call in run.calls) == 8
        # How they are sampled comes with their first rows, and not again.
        assert max(max(sizes) for sizes in run.shard.sizes) < 8192
        assert max(run.shard.sizes[-1]) < 1024


def test_decoding_requests_emit_in_every_step_of_a_chunked_prefill(
    prompts: list[list[int]], alone: list[tuple[int, ...]], plain: LLM, assert_equal: Compare
) -> None:
    long_prompt = [token for prompt in prompts for token in reversed(prompt)][:150]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    (expected,) = plain.generate([long_prompt], sampling)
    # Running ahead, the decoding request would sometimes wait at its optimistic limit.
    with stepped(max_num_seqs=2, max_num_batched_tokens=40, async_scheduling=False) as run:
        run.add("decoding", prompts[0])
        while not run.tokens("decoding"):
            run.engine.step()
        before = len(run.calls)
        run.add("long", long_prompt)
        while not run.tokens("long"):
            run.engine.step()
        during = run.calls[before:]
        # 30 tokens of prompt a step, beside the decoding request's block of 10.
        assert len(during) == 5
        for call in during:
            assert "decoding" in [chunk.request_id for chunk in call if chunk.token_ids]
        run.finish()
        assert_equal([run.tokens("decoding")], alone[:1])
        assert_same_tokens(
            run.tokens("long"), expected.token_ids, long_prompt, plain.next_token_logits
        )


def test_an_abort_in_the_middle_frees_the_pages(
    prompts: list[list[int]], alone: list[tuple[int, ...]], assert_equal: Compare
) -> None:
    with stepped(max_num_seqs=2) as run:
        for i, prompt in enumerate(prompts[:3]):
            run.add(str(i), prompt)
        for _ in range(3):
            run.engine.step()
        run.engine.abort("0")  # running
        run.engine.abort("2")  # waiting for a slot
        run.finish()
        assert len(run.tokens("0")) < MAX_TOKENS
        assert run.tokens("2") == []
        begun = alone[0][: len(run.tokens("0"))]
        assert_equal([run.tokens("0"), run.tokens("1")], [begun, alone[1]])


def test_a_random_drafter_changes_no_token(
    tmp_path: Path, prompts: list[list[int]], alone: list[tuple[int, ...]], assert_equal: Compare
) -> None:
    make_random_drafter(
        tmp_path,
        target_config=AutoConfig.from_pretrained(hub.resolve(hub.DEMO_TARGET)),
        num_layers=1,
        block_size=K + 1,
        target_layer_ids=(3, 20),
        mask_token_id=16,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        seed=5,
    )
    drafter = {"method": "dflash", "model": str(tmp_path)}
    with LLM(**demo_args(speculative_config=drafter)) as llm:
        outputs = llm.generate(prompts[:3], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    assert_equal([output.token_ids for output in outputs], alone[:3])
    assert sum(output.speculation.draft_tokens for output in outputs) > 100


def test_every_output_limit_in_one_batch(
    speculative: LLM, prompts: list[list[int]], alone: list[tuple[int, ...]], plain: LLM
) -> None:
    limits = [1, 2, K, K + 1]
    outputs = speculative.generate(
        prompts[:1] * len(limits), [SamplingParams(max_tokens=n, ignore_eos=True) for n in limits]
    )
    for output, limit in zip(outputs, limits, strict=True):
        assert output.finish_reason == "length"
        assert len(output.token_ids) == limit
        assert_same_tokens(output.token_ids, alone[0][:limit], prompts[0], plain.next_token_logits)


def test_the_end_of_the_context(prompts: list[list[int]], plain: LLM) -> None:
    """Prompts that leave room for 1, 2, K, K + 1 and K + 2 tokens; a full one is refused."""
    max_model_len = 64
    text = [token for prompt in prompts for token in prompt]
    rooms = [1, 2, K, K + 1, K + 2]
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    longest = SamplingParams(max_tokens=max(rooms), ignore_eos=True)
    starts = [text[: max_model_len - room] for room in rooms]
    expected = plain.generate(starts, longest)
    with LLM(**demo_args(max_model_len=max_model_len)) as llm:
        outputs = llm.generate(starts, sampling)
        with pytest.raises(RequestRejected, match="64 tokens, the limit is 63"):
            llm.generate([text[:max_model_len]], sampling)
    for output, whole, room in zip(outputs, expected, rooms, strict=True):
        assert output.finish_reason == "length"
        assert len(output.token_ids) == room
        assert_same_tokens(
            output.token_ids,
            whole.token_ids[:room],
            output.prompt_token_ids,
            plain.next_token_logits,
        )
