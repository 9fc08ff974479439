"""Which sequences and which anchors each step gets: functions of the seed, so a resumed run goes on
exactly."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from training.blocks import choose_anchors
from training.progress import Progress
from training.recipe import Recipe
from training.samples import Sample


@dataclass(frozen=True, slots=True)
class Item:
    """One sample of a step and its anchors."""

    sample: Sample
    anchors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The items of one step, and where the next one begins."""

    items: tuple[Item, ...]
    epoch: int
    index: int


def split_samples(
    samples: Sequence[Sample], num_held_out: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on, and greedy ones to measure acceptance on, as many categories as there
    are taking turns. At most a tenth is held out."""
    order = list(samples)
    random.Random(f"{seed}/held out").shuffle(order)
    by_category: dict[str, list[Sample]] = {}
    for sample in order:
        if sample.temperature == 0:
            by_category.setdefault(sample.category, []).append(sample)
    held_out: list[Sample] = []
    wanted = min(num_held_out, len(samples) // 10)
    while len(held_out) < wanted and any(by_category.values()):
        for category in by_category.values():
            if category and len(held_out) < wanted:
                held_out.append(category.pop())
    # The same text must not be on both sides.
    kept_out = {sample.token_ids for sample in held_out}
    return [sample for sample in samples if sample.token_ids not in kept_out], held_out


def plan_step(samples: Sequence[Sample], recipe: Recipe, progress: Progress) -> Step:
    """The step that follows `progress`: sequences in the epoch's order until their blocks make a
    step."""
    epoch, index = progress.epoch, progress.index
    order = _order(len(samples), recipe.seed, epoch)
    items: list[Item] = []
    num_positions = 0
    while num_positions < recipe.step_positions:
        if index >= len(order):
            epoch, index = epoch + 1, 0
            order = _order(len(samples), recipe.seed, epoch)
        sample = samples[order[index]]
        choose = random.Random(f"{recipe.seed}/{progress.step}/{len(items)}")
        num_tokens = len(sample.token_ids)
        anchors = choose_anchors(len(sample.prompt_ids), num_tokens, recipe.anchors, choose)
        items.append(Item(sample, tuple(anchors)))
        num_positions += len(anchors) * recipe.block_size
        index += 1
    return Step(tuple(items), epoch, index)


def passes(items: Sequence[Item], block_size: int, pass_positions: int) -> list[list[Item]]:
    """The items of a step in passes of at most about `pass_positions` block positions."""
    grouped: list[list[Item]] = []
    num_positions = pass_positions
    for item in items:
        if num_positions >= pass_positions:
            grouped.append([])
            num_positions = 0
        grouped[-1].append(item)
        num_positions += len(item.anchors) * block_size
    return grouped


def candidate_seed(recipe: Recipe, step: int, rank: int, number: int) -> int:
    """The seed of the random candidates of pass `number` of a step on a worker."""
    return random.Random(f"{recipe.seed}/{step}/{rank}/{number}").getrandbits(63)


def frequent_tokens(samples: Sequence[Sample], count: int) -> list[int]:
    """The `count` most frequent tokens of the responses; ties go to the lower id."""
    counts: dict[int, int] = {}
    for sample in samples:
        for token in sample.response_ids:
            counts[token] = counts.get(token, 0) + 1
    return sorted(counts, key=lambda token: (-counts[token], token))[:count]


def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
