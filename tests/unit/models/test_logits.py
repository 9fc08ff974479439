"""What shapes a distribution, against loops over tokens, on one rank and on several."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers import LMHead
from models.logits import constrain, edit, forbid, penalize
from tests.unit.models.ranks import run_heads

SIZES = (1, 2, 3)
FOREVER = 2**31 - 1
Shape = Callable[[Tensor, LMHead], Tensor]
seeds = st.integers(0, 2**32)


def ints(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def right_padded(lists: Sequence[Sequence[int]], extra: int = 0) -> Tensor:
    width = max(map(len, lists), default=0) + extra
    return ints([[*row, *[-1] * (width - len(row))] for row in lists]).reshape(len(lists), width)


def left_padded(words: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    count = max(map(len, words))
    width = max((len(word) for row in words for word in row), default=1)
    filled = [[*row, *[[]] * (count - len(row))] for row in words]
    rows = [[[*[-1] * (width - len(word)), *word] for word in row] for row in filled]
    return ints(rows).reshape(len(words), count, width)


def shaped(logits: Tensor, work: Shape) -> Tensor:
    """`work` on one rank, after a check that it is the same on several."""
    ((expected),) = run_heads(logits, 1, work)
    assert expected.dtype in (torch.float32, logits.dtype)
    for size in SIZES[1:]:
        found = torch.cat(run_heads(logits, size, work), dim=1)
        assert torch.equal(found[:, : logits.shape[1]], expected)
        assert (found[:, logits.shape[1] :] == -math.inf).all()
    return expected


def some_logits(rng: random.Random, rows: int, vocab_size: int) -> Tensor:
    values = [-math.inf, -1e30, -2.5, -0.0, 0.0, 1e-3, 1.5, 7.0, 1e30]
    return floats([rng.choice(values) for _ in range(rows * vocab_size)]).view(rows, vocab_size)


class Histories:
    """Prompts and outputs of few different tokens."""

    def __init__(self, rng: random.Random, rows: int, vocab_size: int) -> None:
        self.prompts = [rng.choices(range(vocab_size), k=rng.randrange(6)) for _ in range(rows)]
        self.outputs = [rng.choices(range(vocab_size), k=rng.randrange(6)) for _ in range(rows)]
        both = [p + o for p, o in zip(self.prompts, self.outputs, strict=True)]
        self.tensor = right_padded(both, extra=rng.randrange(1, 3))
        self.prompt_lens = ints([len(prompt) for prompt in self.prompts])


# -------------------------------------------------------------------------------------- penalties


@settings(deadline=None)
@given(seed=seeds, rows=st.integers(1, 4), vocab_size=st.integers(1, 7))
def test_penalties_equal_a_loop(seed: int, rows: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    logits, history = some_logits(rng, rows, vocab_size), Histories(rng, rows, vocab_size)
    presence, frequency = (
        floats([rng.choice([-2.0, 0.0, 0.5, 2.0]) for _ in range(rows)]) for _ in range(2)
    )
    repetition = floats([rng.choice([0.25, 1.0, 1.1, 2.0]) for _ in range(rows)])

    expected = logits.clone()
    for i in range(rows):
        prompt, output = history.prompts[i], history.outputs[i]
        for token in range(vocab_size):
            value = expected[i, token]
            if token in prompt or token in output:
                value = value / repetition[i] if value > 0 else value * repetition[i]
            value = value - frequency[i] * output.count(token)
            expected[i, token] = value - presence[i] * (token in output)

    found = shaped(
        logits,
        lambda local, head: penalize(
            local, history.tensor, history.prompt_lens, presence, frequency, repetition, head
        ),
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_penalties_by_hand() -> None:
    """Repetition first, then what is subtracted; the prompt counts for repetition alone."""
    logits = floats([[4.0, -4.0, 4.0, 4.0]])
    history = ints([[0, 1, 2, 2, 1, -1]])
    found = shaped(
        logits,
        lambda local, head: penalize(
            local, history, ints([2]), floats([0.5]), floats([0.25]), floats([2.0]), head
        ),
    )
    assert found.tolist() == [[2.0, -8.75, 1.0, 4.0]]


def test_penalties_that_ask_for_nothing_change_nothing() -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    zero, one = torch.zeros(2), torch.ones(2)
    history = ints([[1, 2, 2], [4, 0, -1]])
    found = shaped(
        logits, lambda local, head: penalize(local, history, ints([1, 0]), zero, zero, one, head)
    )
    assert torch.equal(found, logits)


# ------------------------------------------------------------------------------------------ edits


@settings(deadline=None)
@given(seed=seeds, rows=st.integers(1, 4), vocab_size=st.integers(1, 7), edits=st.integers(0, 6))
def test_edits_equal_a_loop(seed: int, rows: int, vocab_size: int, edits: int) -> None:
    rng = random.Random(seed)
    logits = some_logits(rng, rows, vocab_size)
    ids = ints(rng.choices(range(-1, vocab_size), k=rows * edits)).view(rows, edits)
    values = floats(rng.choices([-100.0, 0.5, 3.0, -math.inf], k=rows * edits)).view(rows, edits)
    until = ints(rng.choices([0, 3, 4, FOREVER], k=rows * edits)).view(rows, edits)
    positions = ints(rng.choices([0, 2, 3, 4, 1000], k=rows))

    expected = logits.clone()
    for i in range(rows):
        for j in range(edits):
            if ids[i, j] >= 0 and positions[i] < until[i, j]:
                expected[i, ids[i, j]] += values[i, j]

    found = shaped(logits, lambda local, head: edit(local, ids, values, until, positions, head))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_min_tokens_hold_until_their_position_in_the_batch() -> None:
    """Rows of one block differ: a stop id is banned per token, not per step."""
    logits, ids, values = torch.zeros(4, 3), ints([[2]] * 4), floats([[-math.inf]] * 4)
    until, positions = ints([[10]] * 4), ints([8, 9, 10, 11])
    found = shaped(logits, lambda local, head: edit(local, ids, values, until, positions, head))
    assert found[:, 2].tolist() == [-math.inf, -math.inf, 0.0, 0.0]
    assert (found[:, :2] == 0).all()


# -------------------------------------------------------------------------------------- bad words


def is_bad(word: Sequence[int], output: Sequence[int]) -> bool:
    prefix = list(word[:-1])
    return len(output) >= len(prefix) and list(output[len(output) - len(prefix) :]) == prefix


@settings(deadline=None)
@given(seed=seeds, rows=st.integers(1, 4), vocab_size=st.integers(1, 3))
def test_bad_words_equal_a_loop(seed: int, rows: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    logits, history = some_logits(rng, rows, vocab_size), Histories(rng, rows, vocab_size)
    words = [
        [rng.choices(range(vocab_size), k=rng.randint(1, 4)) for _ in range(rng.randrange(4))]
        for _ in range(rows)
    ]
    expected = logits.clone()
    for i in range(rows):
        for word in words[i]:
            if is_bad(word, history.outputs[i]):
                expected[i, word[-1]] = -math.inf

    tensor = left_padded(words)
    found = shaped(
        logits,
        lambda local, head: forbid(local, tensor, history.tensor, history.prompt_lens, head),
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("word", "history", "prompt_len", "bad"),
    [
        ([3], [0], 1, True),
        ([1, 3], [0, 1], 1, True),
        ([1, 3], [0, 1], 2, False),  # the prefix stands in the prompt
        ([0, 1, 3], [0, 1], 1, False),  # half of it does
        ([0, 1, 3], [2, 0, 1], 1, True),
        ([1, 1, 3], [0, 1], 1, False),  # longer than the output
        ([1, 3], [0, 1, 2], 1, False),  # not at its end
    ],
)
def test_a_word_is_bad_where_the_output_ends_with_the_rest_of_it(
    word: list[int], history: list[int], prompt_len: int, bad: bool
) -> None:
    for extra in range(3):
        tokens = right_padded([history], extra)
        words = torch.cat([torch.full((1, 1, extra), -1), left_padded([[word]])], 2).int()
        found = shaped(
            torch.zeros(1, 4),
            lambda local, head, words=words, tokens=tokens: forbid(  # type: ignore[misc]
                local, words, tokens, ints([prompt_len]), head
            ),
        )
        assert found.tolist() == [[0.0, 0.0, 0.0, -math.inf if bad else 0.0]]


# ---------------------------------------------------------------------------------------- grammar


@settings(deadline=None)
@given(seed=seeds, rows=st.integers(1, 4), vocab_size=st.sampled_from([1, 31, 32, 33, 64, 70]))
def test_a_grammar_leaves_the_tokens_of_its_bits(seed: int, rows: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    logits = some_logits(rng, rows, vocab_size)
    words = -(-vocab_size // 32)
    bitmask = ints([rng.randrange(-(2**31), 2**31) for _ in range(rows * words)]).view(rows, words)
    masked = torch.tensor([rng.random() < 0.5 for _ in range(rows)])

    expected = logits.clone()
    for i in range(rows):
        for token in range(vocab_size):
            if masked[i] and not (int(bitmask[i, token // 32]) >> token % 32) & 1:
                expected[i, token] = -math.inf

    found = shaped(logits, lambda local, head: constrain(local, bitmask, masked, head))
    assert torch.equal(found, expected)


# --------------------------------------------------------------------------------------- the whole


def test_bfloat16_logits_are_shaped_as_the_float32_they_stand_for() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    history, lens = ints([[1, 2, 2], [4, 0, -1]]), ints([1, 0])
    words, positions = ints([[[2]], [[0]]]), ints([3, 2])
    ids, values, until = ints([[1], [8]]), floats([[2.0], [-1.0]]), ints([[5], [5]])
    half = torch.full((2,), 0.5)
    shapes: list[Shape] = [
        lambda local, head: constrain(local, ints([[5], [7]]), torch.tensor([True, False]), head),
        lambda local, head: forbid(local, words, history, lens, head),
        lambda local, head: edit(local, ids, values, until, positions, head),
        lambda local, head: penalize(local, history, lens, half, half, half, head),
    ]
    for shape in shapes:
        assert torch.equal(shaped(logits, shape).float(), shaped(logits.float(), shape))


def test_nothing_is_communicated() -> None:
    operands: list[Tensor] = []
    history, half = ints([[0, 3]]), torch.full((1,), 0.5)
    run_heads(
        torch.zeros(1, 4),
        2,
        lambda local, head: penalize(local, history, ints([1]), half, half, half, head),
        operands,
    )
    assert operands == []
