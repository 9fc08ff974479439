"""Whole steps of a rank, driven by hand, against the oracle's trace of each request."""

import copy
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import pytest
import torch
from torch import Tensor

from models.kv_cache import LayerKV
from models.parallel import TensorParallel
from models.rows import StepInputs
from models.state import SlotState
from models.steps import ModelRank, StepResult
from tests.oracle.dflash_reference import Trace, generate, load_drafter
from tests.tiny import Kind, load_target
from tests.unit.models.conftest import PROMPT, Pair, PairMaker
from tests.unit.models.ranks import load_model_rank, run_ranks

K, PAGE, SCRATCH = 4, 4, 3
OTHER_PROMPT = [7, 250, 41, 3, 200]


@dataclass(frozen=True)
class Decode:
    """A decode row; `position` may be optimistic where `in_flight`."""

    slot: int
    position: int
    num_drafts: int = K
    propose: bool = True
    in_flight: bool = False


@dataclass(frozen=True)
class Prefill:
    """A prefill row; by default the whole of a fresh request's prompt."""

    slot: int
    tokens: Sequence[int]
    start: int = 0
    last: bool = True
    propose: bool = True


def inputs(
    decode: Iterable[Decode] = (),
    prefill: Iterable[Prefill] = (),
    *,
    width: int = K + 1,
    num_drafts: int = K,
    pages: int = 16,
    padding: int = 0,
) -> StepInputs:
    """The tensors of a step, with `padding` more rows in both grids, emitting rows, tokens in
    prefill rows and tokens behind the grids."""
    decode, prefill = list(decode), list(prefill)
    last = [i for i, row in enumerate(prefill) if row.last]
    emitting = [*decode, *(prefill[i] for i in last)]

    def ints(values: list[int], fill: int = 0) -> Tensor:
        return torch.tensor([*values, *[fill] * padding], dtype=torch.int32)

    length = max([len(row.tokens) for row in prefill], default=0) + padding
    tokens = torch.zeros(len(prefill) + padding, length, dtype=torch.int32)
    for i, row in enumerate(prefill):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
    num_decode = len(decode) + padding
    return StepInputs(
        verify_width=width,
        num_drafts=num_drafts if len(emitting) + padding else 0,
        num_tokens=num_decode * width + tokens.numel() + padding,
        context_pages=pages,
        choosing="greedy",
        num_logprobs=-1,
        num_prompt_logprobs=-1,
        decode_slots=ints([row.slot for row in decode], SCRATCH),
        decode_positions=ints([row.position for row in decode]),
        decode_num_drafts=ints([row.num_drafts for row in decode]),
        decode_in_flight=ints([row.in_flight for row in decode]).bool(),
        decode_valid=ints([1] * len(decode)).bool(),
        prefill_slots=ints([row.slot for row in prefill], SCRATCH),
        prefill_starts=ints([row.start for row in prefill]),
        prefill_counts=ints([len(row.tokens) for row in prefill]),
        prefill_tokens=tokens,
        prefill_next=ints([-1] * len(prefill), fill=-1),
        prefill_fresh=ints([row.start == 0 for row in prefill]).bool(),
        emitting=ints([*range(len(decode)), *(num_decode + i for i in last)], fill=-1),
        proposed=ints([num_drafts * row.propose for row in emitting]),
    )


def emitted(result: StepResult) -> list[list[int]]:
    """The tokens of every emitting row; padding must follow them."""
    rows = []
    for row in result.sampled.tolist():
        count = sum(token >= 0 for token in row)
        assert row[count:] == [-1] * (len(row) - count)
        rows.append(row[:count])
    return rows


def trace_of(pair: Pair, prompt: Sequence[int], max_new_tokens: int = 40) -> Trace:
    return generate(load_target(pair[0]), load_drafter(pair[1]), prompt, max_new_tokens)


def drafts_in(rank: ModelRank, slot: int) -> list[int]:
    """What the slot's next step verifies."""
    drafts: list[int] = rank.state.drafts[slot, : int(rank.state.num_drafts[slot])].tolist()
    return drafts


@torch.inference_mode()
def prefilled(pair: Pair, prompt: Sequence[int] = PROMPT, slot: int = 0) -> ModelRank:
    """A rank with one request behind its prompt."""
    rank = load_model_rank(pair[0], pair[1], page_size=PAGE)
    rank.step(inputs(prefill=[Prefill(slot, prompt)]))
    return rank


def layers_of(rank: ModelRank) -> list[LayerKV]:
    """Of target and drafter."""
    return [*rank.target_kv, *(rank.drafting.kv if rank.drafting else ())]


def poison(rank: ModelRank, slot: int, length: int) -> None:
    """Overwrite all KV of the slot from position `length` on."""
    table = rank.state.block_table[slot].tolist()
    for layer in layers_of(rank):
        for position in range(length, len(table) * PAGE):
            layer.k[table[position // PAGE], position % PAGE] = 1e3
            layer.v[table[position // PAGE], position % PAGE] = 1e3


# -------------------------------------------------------------------------- against the oracle


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
@torch.inference_mode()
def test_steps_follow_the_oracle_and_rejected_rows_stay_invisible(
    trained: PairMaker, kind: Kind
) -> None:
    pair = trained(kind)
    trace = trace_of(pair, PROMPT)
    assert {1, K + 1} < {len(step.emitted) for step in trace.steps}
    rank = load_model_rank(*pair, page_size=PAGE)
    result = rank.step(inputs(prefill=[Prefill(0, PROMPT)]))
    assert emitted(result) == [trace.token_ids[:1]]
    assert result.num_drafts.tolist() == [0]
    position = len(PROMPT)
    for step in trace.steps[:-1]:
        assert drafts_in(rank, 0) == step.drafts
        poison(rank, 0, position)
        result = rank.step(inputs([Decode(0, position)]))
        assert emitted(result) == [step.emitted]
        assert result.num_drafts.tolist() == [K]
        position += len(step.emitted)


@torch.inference_mode()
def test_requests_in_one_step_are_as_each_alone(trained: PairMaker) -> None:
    """The second is prefilled while the first decodes, then both decode, in either order."""
    pair = trained("qwen3")
    first, second = trace_of(pair, PROMPT), trace_of(pair, OTHER_PROMPT)
    rank = load_model_rank(*pair, page_size=PAGE)
    rank.step(inputs(prefill=[Prefill(2, PROMPT)]))
    result = rank.step(inputs([Decode(2, len(PROMPT))], [Prefill(0, OTHER_PROMPT)], padding=1))
    assert emitted(result) == [first.steps[0].emitted, second.token_ids[:1], []]
    positions = {0: len(OTHER_PROMPT), 2: len(PROMPT) + len(first.steps[0].emitted)}
    for i in range(6):
        steps = {0: second.steps[i], 2: first.steps[1 + i]}
        order = [0, 2] if i % 2 else [2, 0]
        for slot in order:
            assert drafts_in(rank, slot) == steps[slot].drafts
        result = rank.step(inputs([Decode(slot, positions[slot]) for slot in order]))
        assert emitted(result) == [steps[slot].emitted for slot in order]
        for slot in order:
            positions[slot] += len(steps[slot].emitted)


@pytest.mark.parametrize("chunks", [[4, 4, 3], [1, 9, 1], [10, 1]])
@pytest.mark.parametrize("in_one_step", [False, True])
@torch.inference_mode()
def test_chunked_prefill_is_as_whole(
    trained: PairMaker, chunks: list[int], in_one_step: bool
) -> None:
    """Also with a prompt's rows in one step in whatever order: all KV is written before it is
    read, and only the last row owns the slot's state."""
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    rank = load_model_rank(*pair, page_size=PAGE)
    rows, start = [], 0
    for chunk in chunks:
        end = start + chunk
        rows.append(Prefill(1, PROMPT[start:end], start, last=end == len(PROMPT)))
        start = end
    assert start == len(PROMPT)
    if in_one_step:
        assert emitted(rank.step(inputs(prefill=rows[::-1]))) == [trace.token_ids[:1]]
    else:
        for row in rows:
            result = emitted(rank.step(inputs(prefill=[row], padding=2)))
            assert result == [trace.token_ids[:1]] * row.last + [[], []]
            if not row.last:
                assert drafts_in(rank, 1) == []
    assert drafts_in(rank, 1) == trace.steps[0].drafts
    result = rank.step(inputs([Decode(1, len(PROMPT))]))
    assert emitted(result) == [trace.steps[0].emitted]
    assert drafts_in(rank, 1) == trace.steps[1].drafts


@torch.inference_mode()
def test_a_chunk_that_is_not_the_last_leaves_the_slots_state_alone(trained: PairMaker) -> None:
    rank = load_model_rank(*trained("qwen3"), page_size=PAGE)
    rank.step(inputs(prefill=[Prefill(0, PROMPT[:5], last=False)]))
    assert rank.state.sampled[0].tolist() == [-1] * (K + 1)
    assert int(rank.state.planned[0]) == int(rank.state.num_drafts[0]) == 0


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_and_exchange_no_vocabulary(trained: PairMaker, size: int) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    operands: list[Tensor] = []

    def work(tp: TensorParallel) -> list[list[int]]:
        rank = load_model_rank(*pair, tp=tp, page_size=PAGE)
        rows = emitted(rank.step(inputs(prefill=[Prefill(0, PROMPT)])))
        position = len(PROMPT)
        for _ in range(4):
            rows += emitted(rank.step(inputs([Decode(0, position)])))
            position += len(rows[-1])
        return rows

    expected = [trace.token_ids[:1], *(step.emitted for step in trace.steps[:4])]
    assert run_ranks(size, work, operands) == [expected] * size
    widths = {300, 300 // size}
    assert operands
    assert all(widths.isdisjoint(operand.shape) for operand in operands)


@torch.inference_mode()
def test_without_a_drafter_every_step_emits_one_token(trained: PairMaker) -> None:
    pair = trained("qwen3")
    expected = trace_of(pair, PROMPT, 6).token_ids
    rank = load_model_rank(pair[0], None, page_size=PAGE)
    found = emitted(rank.step(inputs(prefill=[Prefill(0, PROMPT)], width=1)))
    for i in range(5):
        row = Decode(0, len(PROMPT) + i, num_drafts=0)
        found += emitted(rank.step(inputs([row], width=1)))
    assert found == [[token] for token in expected]


# ------------------------------------------------------------------------- drafts asked and given


@pytest.mark.parametrize("num_drafts", range(K + 1))
@torch.inference_mode()
def test_a_shorter_prefix_of_the_drafts_is_verified(trained: PairMaker, num_drafts: int) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    rank, position = prefilled(pair), len(PROMPT)
    tokens = list(trace.token_ids[:1])
    for _ in range(6):
        drafts = drafts_in(rank, 0)[:num_drafts]
        future = trace.token_ids[len(tokens) :]
        matches = [a == b for a, b in zip(drafts, future, strict=False)]
        expected = future[: [*matches, False].index(False) + 1]
        result = rank.step(inputs([Decode(0, position, num_drafts)]))
        assert result.num_drafts.tolist() == [num_drafts]
        assert emitted(result) == [expected]
        tokens += expected
        position += len(expected)


@torch.inference_mode()
def test_a_narrow_bucket_verifies_what_it_has_room_for(trained: PairMaker) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    rank, position, tokens = prefilled(pair), len(PROMPT), trace.token_ids[:1]
    for _ in range(6):
        result = rank.step(inputs([Decode(0, position, num_drafts=2)], width=3))
        (new,) = emitted(result)
        assert 1 <= len(new) <= 3
        tokens = tokens + new
        position += len(new)
    assert tokens == trace.token_ids[: len(tokens)]
    assert len(tokens) > 7


@torch.inference_mode()
def test_a_step_that_does_not_propose_leaves_nothing_to_verify(trained: PairMaker) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    rank = prefilled(pair)
    first = rank.step(inputs([Decode(0, len(PROMPT), propose=False)]))
    assert emitted(first) == [trace.steps[0].emitted]
    assert int(rank.state.num_drafts[0]) == 0

    fed = 1 + len(trace.steps[0].emitted)
    second = rank.step(inputs([Decode(0, len(PROMPT) + fed - 1, num_drafts=K)]))
    assert second.num_drafts.tolist() == [0], "never more than there are"
    assert emitted(second) == [trace.token_ids[fed : fed + 1]]

    rank.step(inputs(prefill=[Prefill(1, OTHER_PROMPT, propose=False)]))
    assert drafts_in(rank, 1) == []


@torch.inference_mode()
def test_a_request_may_fill_its_pages_to_the_last_position(trained: PairMaker) -> None:
    pair = trained("qwen3")
    max_model_len = len(PROMPT) + 10  # 21: one token in the last page
    trace = trace_of(pair, PROMPT, 11)
    rank = load_model_rank(*pair, page_size=PAGE, max_model_len=max_model_len)
    (tokens,) = emitted(rank.step(inputs(prefill=[Prefill(0, PROMPT)], pages=6)))
    while len(tokens) < 11:
        position = len(PROMPT) + len(tokens) - 1
        row = Decode(0, position, num_drafts=min(K, max_model_len - 1 - position))
        (new,) = emitted(rank.step(inputs([row], pages=6)))
        tokens = tokens + new
    assert tokens == trace.token_ids


# --------------------------------------------------------------------------------- padding, slots


def pools(rank: ModelRank) -> list[Tensor]:
    return [pool for layer in layers_of(rank) for pool in (layer.k, layer.v)]


def state_of(rank: ModelRank) -> list[Tensor]:
    return [getattr(rank.state, field.name) for field in fields(SlotState)]


@torch.inference_mode()
def test_padded_rows_write_to_the_null_page_and_the_scratch_slot_only(
    trained: PairMaker,
) -> None:
    rank = prefilled(trained("qwen3"), slot=1)
    before = copy.deepcopy((pools(rank), state_of(rank)))
    result = rank.step(inputs(padding=3))
    assert emitted(result) == [[]] * 3
    assert result.num_drafts.tolist() == [0] * 3
    for old, new in zip(before[0], pools(rank), strict=True):
        assert torch.equal(new[1:], old[1:])
        assert new.isfinite().all()
    for old, new in zip(before[1], state_of(rank), strict=True):
        assert torch.equal(new[:SCRATCH], old[:SCRATCH])
    assert drafts_in(rank, SCRATCH) == [], "nothing to propose"


@torch.inference_mode()
def test_padding_changes_no_row(trained: PairMaker) -> None:
    """Rows, tokens and context pages beyond what is needed."""
    pair = trained("qwen3")
    tight, padded = prefilled(pair), prefilled(pair)
    for rank in (tight, padded):
        for tensor in pools(rank):
            tensor[0] = 7.0  # whatever earlier padding left there
    decode, prefill = [Decode(0, len(PROMPT))], [Prefill(1, OTHER_PROMPT)]
    one = tight.step(inputs(decode, prefill, pages=4))
    two = padded.step(inputs(decode, prefill, pages=16, padding=3))
    assert emitted(two) == [*emitted(one), [], [], []]
    for a, b in zip(pools(tight), pools(padded), strict=True):
        torch.testing.assert_close(b[1:], a[1:], rtol=0, atol=1e-5 * float(a[1:].abs().max()))
    for a, b in zip(state_of(tight), state_of(padded), strict=True):
        assert torch.equal(b[:SCRATCH], a[:SCRATCH])


@torch.inference_mode()
def test_rejected_tokens_never_reach_the_drafters_pages(trained: PairMaker) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    rank, position = prefilled(pair), len(PROMPT)
    table = rank.state.block_table[0].tolist()
    for step in trace.steps[:4]:
        rank.step(inputs([Decode(0, position)]))
        position += len(step.emitted)
        assert rank.drafting is not None
        for layer in rank.drafting.kv:
            where = [(table[i // PAGE], i % PAGE) for i in range(len(table) * PAGE)]
            written = [bool(layer.k[page, offset].any()) for page, offset in where]
            assert written == [i < position for i in range(len(where))]


@torch.inference_mode()
def test_a_fresh_row_forgets_the_slots_last_request(trained: PairMaker) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, OTHER_PROMPT)
    rank = prefilled(pair)
    rank.step(inputs([Decode(0, len(PROMPT))]))
    rank.step(inputs(prefill=[Prefill(0, OTHER_PROMPT[:2], last=False)]))
    assert rank.state.sampled[0].tolist() == [-1] * (K + 1)
    assert drafts_in(rank, 0) == []
    rank.step(inputs(prefill=[Prefill(0, OTHER_PROMPT[2:], start=2)]))
    assert drafts_in(rank, 0) == trace.steps[0].drafts
    result = rank.step(inputs([Decode(0, len(OTHER_PROMPT))]))
    assert emitted(result) == [trace.steps[0].emitted]


# ----------------------------------------------------------------------------------------- async


@torch.inference_mode()
def test_optimistic_positions_are_repaired_on_the_device(trained: PairMaker) -> None:
    """The host never reads an output: it plans every step as if all drafts were accepted."""
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    exact, late = prefilled(pair), prefilled(pair)
    position, optimistic = len(PROMPT), len(PROMPT)
    differed = False
    for step in trace.steps[:-1]:
        one = exact.step(inputs([Decode(0, position)]))
        two = late.step(inputs([Decode(0, optimistic, in_flight=True)], padding=1))
        assert emitted(two)[0] == emitted(one)[0] == step.emitted
        differed |= optimistic != position
        position += len(step.emitted)
        # What the host assumes of the step it has just planned, whose true start it learns from
        # the output before it.
        optimistic = position - len(step.emitted) + 1 + K
    assert differed
    for a, b in zip(pools(exact), pools(late), strict=True):
        torch.testing.assert_close(b[1:], a[1:], rtol=0, atol=1e-5 * float(a[1:].abs().max()))
    for a, b in zip(state_of(exact), state_of(late), strict=True):
        assert torch.equal(b[:SCRATCH], a[:SCRATCH])


@torch.inference_mode()
def test_the_step_behind_an_unread_prefill_has_nothing_to_repair(trained: PairMaker) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    rank = prefilled(pair)
    result = rank.step(inputs([Decode(0, len(PROMPT), in_flight=True)]))
    assert emitted(result) == [trace.steps[0].emitted]


@torch.inference_mode()
def test_rows_in_flight_and_rows_that_were_read_share_a_step(trained: PairMaker) -> None:
    """Slot 0 is planned late after a step with a shorter prefix, slot 1 exactly."""
    pair = trained("qwen3")
    first, second = trace_of(pair, PROMPT), trace_of(pair, OTHER_PROMPT)
    rank = load_model_rank(*pair, page_size=PAGE)
    rank.step(inputs(prefill=[Prefill(0, PROMPT), Prefill(1, OTHER_PROMPT)]))
    lengths = len(PROMPT), len(OTHER_PROMPT)
    (one, two) = emitted(
        rank.step(inputs([Decode(0, lengths[0], num_drafts=2), Decode(1, lengths[1])]))
    )
    assert one == first.token_ids[1 : 1 + len(one)]
    assert len(one) < 3, "something was rejected"
    rows = [
        Decode(1, lengths[1] + len(two)),
        Decode(0, lengths[0] + 3, in_flight=True),
    ]
    result = emitted(rank.step(inputs(rows)))
    assert result[0] == second.steps[1].emitted
    start = 1 + len(one)
    assert result[1] == first.token_ids[start : start + len(result[1])]
    fed = lengths[0] + len(one) + len(result[1])
    following = emitted(rank.step(inputs([Decode(0, fed)])))[0]
    start += len(result[1])
    assert following == first.token_ids[start : start + len(following)]


@dataclass(eq=False)
class Replay:
    """One request replayed by hand: its plain tokens, how many are out, what its slot holds."""

    prompt: list[int]
    tokens: list[int]
    fed: int = 0
    out: int = 0
    drafts: list[int] = field(default_factory=list)
    planned: int = 0
    emitted: int = 0
    in_vain: bool = False  # more drafts were planned than there were
    unread: bool = False

    def prefill(self, count: int) -> list[int]:
        self.fed += count
        if self.fed < len(self.prompt):
            return []
        self.planned, self.emitted, self.out = 0, 1, 1
        return self.tokens[:1]

    def verify(self, num_drafts: int) -> list[int]:
        """What a step with so many planned drafts emits, draft by draft."""
        future = self.tokens[self.out :]
        count = 1
        for draft, token in zip(self.drafts[:num_drafts], future, strict=False):
            if draft != token:
                break
            count += 1
        self.in_vain = num_drafts > len(self.drafts)
        self.planned, self.emitted = num_drafts, count
        self.fed += count
        self.out += count
        return future[:count]


class History:
    """Random steps of three slots; the host reads an output in time, late or not at all."""

    def __init__(self, rng: random.Random, texts: Sequence[tuple[list[int], list[int]]]) -> None:
        self.rng = rng
        self.texts = texts
        self.slots = {slot: Replay(*rng.choice(texts)) for slot in range(3)}
        self.met: Counter[str] = Counter()

    def decode(self, slot: int) -> Decode:
        request = self.slots[slot]
        in_flight = request.unread
        if in_flight and self.rng.random() < 0.2:
            in_flight = False
            self.met["read in time"] += 1
        ahead = 1 + request.planned - request.emitted if in_flight else 0
        self.met["corrected"] += ahead > 0
        self.met["planned in vain"] += in_flight and request.in_vain
        return Decode(
            slot,
            request.fed + ahead,
            num_drafts=self.rng.randint(0, K),
            propose=self.rng.random() < 0.7,
            in_flight=in_flight,
        )

    def prefill(self, slot: int) -> Prefill:
        request = self.slots[slot]
        left = len(request.prompt) - request.fed
        count = self.rng.randint(1, left)
        chunk = request.prompt[request.fed : request.fed + count]
        propose = self.rng.random() < 0.7
        return Prefill(slot, chunk, request.fed, last=count == left, propose=propose)

    def step(self, rank: ModelRank) -> None:
        decode, prefill = [], []
        for slot in self.rng.sample(range(3), 3):
            request = self.slots[slot]
            if request.out + K + 1 > len(request.tokens):
                request = self.slots[slot] = Replay(*self.rng.choice(self.texts))
            if self.rng.random() < 0.2:
                self.met["left out"] += request.unread
                request.unread = False
            elif request.fed < len(request.prompt):
                prefill.append(self.prefill(slot))
            else:
                decode.append(self.decode(slot))
        if not decode and not prefill:
            return
        verified = [min(d.num_drafts, len(self.slots[d.slot].drafts)) for d in decode]
        expected = [self.slots[row.slot].verify(row.num_drafts) for row in decode]
        first = [self.slots[row.slot].prefill(len(row.tokens)) for row in prefill]
        expected += [tokens for tokens in first if tokens]
        result = rank.step(inputs(decode, prefill))
        assert emitted(result) == expected
        assert result.num_drafts.tolist() == verified + [0] * sum(row.last for row in prefill)
        for row in (*decode, *(row for row in prefill if row.last)):
            request = self.slots[row.slot]
            request.unread = True
            request.drafts = drafts_in(rank, row.slot)
            assert len(request.drafts) == (K if row.propose else 0)
            assert int(rank.state.planned[row.slot]) == request.planned


@torch.inference_mode()
def test_random_histories_are_corrected_as_a_replay_says(trained: PairMaker) -> None:
    """Rows that are unread, were read, were left out or are fresh; fewer drafts than planned."""
    pair = trained("qwen3")
    prompts = [PROMPT, OTHER_PROMPT, PROMPT[::-1]]
    texts = [(prompt, trace_of(pair, prompt).token_ids) for prompt in prompts]
    met: Counter[str] = Counter()
    for seed in range(6):
        rank = load_model_rank(*pair, page_size=PAGE)
        history = History(random.Random(seed), texts)
        for _ in range(40):
            history.step(rank)
        met += history.met
    kinds = ("corrected", "planned in vain", "read in time", "left out")
    assert min(met[kind] for kind in kinds) > 10, met
