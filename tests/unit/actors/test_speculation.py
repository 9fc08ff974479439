import random

import pytest

from actors.speculation import Speculation

WIDTHS = (1, 4, 10)
FEW, ALL = 3, 9


def accepting(speculation: Speculation, rate: float, num_drafts: int = ALL) -> Speculation:
    """After many rows whose every draft was right so often."""
    rng = random.Random(0)
    for _ in range(5_000):
        accepted = 0
        while accepted < num_drafts and rng.random() < rate:
            accepted += 1
        speculation.observe_accepted(num_drafts, accepted)
    return speculation


def timed(*, plain: float, few: float, every: float, rate: float, rows: int = 1) -> Speculation:
    """Steps of `rows` rows take so many seconds without, with a few and with all drafts."""
    speculation = accepting(Speculation(ALL, WIDTHS, adaptive=True), rate)
    for num_drafts, seconds in ((0, plain), (FEW, few), (ALL, every)):
        speculation.observe_time(rows, num_drafts, seconds)
    return speculation


def choices(speculation: Speculation, rows: int, count: int) -> list[int]:
    """`count` steps that take as long as they did before."""
    found = []
    for _ in range(count):
        num_drafts = speculation.choose(rows)
        speculation.observe_time(rows, num_drafts, speculation._sizes[rows].times_s[num_drafts])
        found.append(num_drafts)
    return found


def test_expected_tokens_are_one_and_each_drafts_chance_to_be_reached_and_right() -> None:
    speculation = accepting(Speculation(ALL, WIDTHS, adaptive=True), rate=0.5)
    assert speculation.expected_tokens(0) == 1
    for num_drafts in (1, 3, 9):
        expected = sum(0.5**i for i in range(num_drafts + 1))
        assert speculation.expected_tokens(num_drafts) == pytest.approx(expected, rel=0.05)


def test_rates_are_known_apart_for_each_position() -> None:
    speculation = Speculation(2, (3,), adaptive=True)
    for _ in range(5_000):
        speculation.observe_accepted(2, 1)
    assert speculation.expected_tokens(1) == pytest.approx(2, abs=0.01)
    assert speculation.expected_tokens(2) == pytest.approx(2, abs=0.01)


def test_drafts_that_were_not_verified_say_nothing() -> None:
    speculation = Speculation(2, (2, 3), adaptive=True)
    before = speculation.expected_tokens(2) - speculation.expected_tokens(1)
    for _ in range(100):
        speculation.observe_accepted(0, 0)
    assert speculation.expected_tokens(2) - speculation.expected_tokens(1) == before


def test_a_new_drafter_is_believed_little_and_soon_known() -> None:
    speculation = Speculation(ALL, WIDTHS, adaptive=True)
    assert speculation.expected_tokens(ALL) > 2
    for _ in range(40):
        speculation.observe_accepted(ALL, 0)
    assert speculation.expected_tokens(ALL) < 1.5


@pytest.mark.parametrize(
    ("plain", "few", "every", "rate", "chosen"),
    [
        (20, 22, 25, 0.8, ALL),  # good drafts, cheap to verify
        (20, 22, 25, 0.3, FEW),  # the later ones are hardly ever reached
        (20, 40, 80, 0.8, FEW),  # a busy machine
        (20, 40, 80, 0.3, 0),
        (20, 21, 22, 0.0, 0),  # useless drafts
    ],
)
def test_the_choice_is_what_makes_tokens_come_fastest(
    plain: float, few: float, every: float, rate: float, chosen: int
) -> None:
    assert timed(plain=plain, few=few, every=every, rate=rate).choose(1) == chosen


def test_batch_sizes_are_judged_apart() -> None:
    speculation = timed(plain=20, few=22, every=25, rate=0.8, rows=1)
    for num_drafts, seconds in ((0, 20), (FEW, 90), (ALL, 200)):
        speculation.observe_time(8, num_drafts, seconds)
    assert speculation.choose(1) == ALL
    assert speculation.choose(8) == 0


def test_everything_is_verified_until_all_times_are_known() -> None:
    speculation = accepting(Speculation(ALL, WIDTHS, adaptive=True), rate=0.0)
    for num_drafts, seconds in ((0, 20), (ALL, 30)):
        speculation.observe_time(1, num_drafts, seconds)
        assert speculation.choose(1) == ALL
    speculation.observe_time(1, FEW, 25)
    assert speculation.choose(1) == 0


def test_not_adaptive_always_verifies_everything() -> None:
    speculation = accepting(Speculation(ALL, WIDTHS, adaptive=False), rate=0.0)
    for num_drafts, seconds in ((0, 1), (FEW, 5), (ALL, 9)):
        speculation.observe_time(1, num_drafts, seconds)
    assert choices(speculation, 1, 500) == [ALL] * 500


def test_no_drafts_is_always_a_choice() -> None:
    assert Speculation(3, (2, 4), adaptive=True).choices == [0, 1, 3]
    assert Speculation(3, (4,), adaptive=True).choices == [0, 3]


def test_without_a_drafter_there_are_no_drafts() -> None:
    assert Speculation(0, (1,), adaptive=True).choose(4) == 0


def test_noise_does_not_change_the_choice() -> None:
    speculation = timed(plain=20, few=22, every=60, rate=0.05)
    chosen = speculation.choose(1)
    rng, found = random.Random(0), []
    for _ in range(300):
        num_drafts = speculation.choose(1)
        speculation.observe_time(
            1, num_drafts, {0: 20, FEW: 20.7, ALL: 60}[num_drafts] * rng.uniform(0.97, 1.03)
        )
        found.append(num_drafts)
    others = sum(num_drafts != chosen for num_drafts in found)
    assert others < 0.03 * len(found), "but for probes"


def test_one_step_that_was_held_up_does_not_change_the_choice() -> None:
    speculation = timed(plain=20, few=22, every=25, rate=0.8)
    speculation.observe_time(1, ALL, 2_000)
    assert speculation.choose(1) == ALL


def test_a_machine_that_became_slow_for_drafts_changes_it() -> None:
    speculation = timed(plain=20, few=22, every=25, rate=0.5)
    for _ in range(200):
        for num_drafts in (FEW, ALL):
            speculation.observe_time(1, num_drafts, 60)
    assert choices(speculation, 1, 100).count(0) > 90


def test_what_was_not_chosen_is_tried_at_times_in_turn_for_two_steps() -> None:
    speculation = timed(plain=20, few=40, every=80, rate=0.1)
    found = choices(speculation, 1, 3_000)
    tried = [num_drafts for num_drafts in found if num_drafts]
    assert tried[:6] == [FEW, FEW, ALL, ALL, FEW, FEW]
    first = found.index(FEW)
    assert found[first : first + 3] == [FEW, FEW, 0], "one step proposes, the next verifies"
    seconds = {0: 20, FEW: 40, ALL: 80}
    share = sum(seconds[n] for n in tried) / sum(seconds[n] for n in found)
    assert 0.005 < share < 0.011


def test_better_drafts_are_noticed_though_none_are_verified() -> None:
    speculation = timed(plain=20, few=22, every=80, rate=0.0)
    assert speculation.choose(1) == 0
    verified = 0
    for _ in range(20_000):
        num_drafts = speculation.choose(1)
        speculation.observe_time(1, num_drafts, {0: 20, FEW: 22, ALL: 80}[num_drafts])
        if num_drafts:
            speculation.observe_accepted(num_drafts, num_drafts)
            verified += 1
    assert speculation.choose(1) == FEW
    assert verified > 15_000, "soon, not at the very end"


def test_what_is_faster_in_halves_is_chosen_for_that() -> None:
    speculation = timed(plain=1.0, few=4.0, every=4.0, rate=0.7, rows=8)
    assert speculation.choose(8) == 0
    speculation.observe_overlap(8, ALL, 2.0 / 1.01)
    assert not speculation.overlaps(8, ALL), "no more than noise"
    speculation.observe_overlap(8, ALL, 0.5)
    assert speculation.overlaps(8, ALL)
    assert not speculation.overlaps(8, FEW)
    assert not speculation.overlaps(4, ALL)
    assert speculation.settled(8) == ALL
