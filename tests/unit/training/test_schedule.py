"""What each step trains on depends on the seed and on how far the run is, on nothing else."""

from training.progress import Progress
from training.recipe import Recipe
from training.samples import Sample
from training.schedule import frequent_tokens, passes, plan_step, split_samples


def samples(count: int) -> list[Sample]:
    return [
        Sample(
            id=str(i),
            category="ab"[i % 2],
            prompt_ids=(1, 2, i),
            response_ids=tuple(range(i, i + 6)),
            temperature=0.7 if i % 4 == 3 else 0.0,
        )
        for i in range(count)
    ]


def test_an_epoch_has_every_sample_once() -> None:
    recipe, progress, seen = Recipe(step_positions=100), Progress(), []
    own = samples(10)
    while progress.epoch == 0:
        step = plan_step(own, recipe, progress)
        assert step == plan_step(own, recipe, progress)
        seen += [item.sample.id for item in step.items]
        progress = Progress(step=progress.step + 1, epoch=step.epoch, index=step.index)
    assert sorted(seen[:10]) == sorted(sample.id for sample in own)
    # Five anchors of ten positions each: two samples a step.
    assert progress.step == 6


def test_anchors_differ_from_epoch_to_epoch() -> None:
    recipe = Recipe(step_positions=1, anchors=2)
    own = samples(1)
    chosen = {plan_step(own, recipe, Progress(step=i)).items[0].anchors for i in range(20)}
    assert len(chosen) > 5


def test_passes_hold_all_items_in_order() -> None:
    items = plan_step(samples(10), Recipe(step_positions=500), Progress()).items
    groups = passes(items, 10, 120)
    assert [item for group in groups for item in group] == list(items)
    assert [len(group) for group in groups] == [3, 3, 3, 1]


def test_held_out_samples_are_greedy_and_of_every_category() -> None:
    training, held_out = split_samples(samples(40), 4, 0)
    assert len(held_out) == 4
    assert [sample.category for sample in held_out].count("a") == 2
    assert all(sample.temperature == 0 for sample in held_out)
    assert len(training) == 36
    assert not {s.id for s in training} & {s.id for s in held_out}
    assert split_samples(samples(40), 4, 0)[1] == held_out


def test_at_most_a_tenth_is_held_out_and_never_a_copy() -> None:
    own = samples(10)
    training, held_out = split_samples([*own, *own], 16, 0)
    assert len(held_out) == 2
    kept_out = {sample.id for sample in held_out}
    assert not {sample.id for sample in training} & kept_out


def test_frequent_tokens() -> None:
    # Token i occurs in the responses of samples i - 5 to i.
    assert frequent_tokens(samples(10), 3) == [5, 6, 7]
