"""Anchors, labels and weights, each against a slow spelling of it."""

import math
import random

import pytest
import torch

from training.blocks import (
    NO_LABEL,
    Anchored,
    choose_anchors,
    draft_weights,
    labels_of,
    make_batch,
)


def test_anchors_are_places_of_bonus_tokens_with_a_label() -> None:
    counts: dict[int, int] = {}
    for seed in range(2000):
        anchors = choose_anchors(3, 9, 2, random.Random(seed))
        assert len(set(anchors)) == 2
        assert anchors == sorted(anchors)
        for anchor in anchors:
            counts[anchor] = counts.get(anchor, 0) + 1
    # Tokens 3..8 are the response; behind 8 nothing is known.
    assert sorted(counts) == [3, 4, 5, 6, 7]
    assert max(counts.values()) < 1.2 * min(counts.values())


@pytest.mark.parametrize(("num_tokens", "expected"), [(4, []), (5, [3]), (6, [3, 4])])
def test_few_places_are_all_taken(num_tokens: int, expected: list[int]) -> None:
    assert choose_anchors(3, num_tokens, 96, random.Random(0)) == expected


def test_weights_fall_exponentially() -> None:
    expected = [math.exp(-(j - 1) / 5.0) for j in range(1, 10)]
    assert draft_weights(9, 5.0).tolist() == pytest.approx(expected)


def test_labels_are_the_tokens_behind_the_anchor() -> None:
    tokens, anchors = list(range(100, 110)), [2, 7, 8]
    found = labels_of(tokens, anchors, 3)
    for row, anchor in enumerate(anchors):
        for j in range(1, 4):
            expected = tokens[anchor + j] if anchor + j < len(tokens) else NO_LABEL
            assert found[row, j - 1] == expected


def test_a_batch_holds_sequences_side_by_side() -> None:
    first = Anchored([5, 6, 7, 8, 9], [1, 3], torch.full((4, 2), 1.0))
    second = Anchored([15, 16, 17, 18], [2], torch.full((3, 2), 2.0))
    batch = make_batch([first, second], 3, 99)
    assert batch.blocks.tolist() == [[6, 99, 99], [8, 99, 99], [17, 99, 99]]
    assert batch.anchors.tolist() == [1, 3, 2]
    assert batch.labels.tolist() == [[7, 8], [9, NO_LABEL], [18, NO_LABEL]]
    # Context ends before each sequence's last anchor.
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.aux[:, 0].tolist() == [1, 1, 1, 2, 2]
    assert batch.num_positions == 9
