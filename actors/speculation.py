"""How many drafts a step verifies: as many as make tokens come fastest, none if none do.

A drafter's block has a fixed width, the target's work does not: every draft that is verified
widens the step, and drafting itself takes time. Whether that pays depends on how often drafts are
accepted and on how busy the machine is, so both are measured while the engine runs. No choice made
here changes a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# An acceptance rate is an average over about this many verified drafts ...
_MEMORY = 200
# ... and begins as if so many had been seen, so often right that the drafter is given a try.
_FIRST_SEEN, _FIRST_RATE = 10, 0.7
# How much of a new time counts: a machine's speed drifts, single steps are noisy.
_TIME_SHARE = 0.1
# Another choice has to be so much better, or noise would change the choice all the time.
_BETTER = 1.03
# The share of its time that an engine may spend on trying what it did not choose.
_PROBE_SHARE = 0.01
# One step proposes what the next verifies.
_PROBE_STEPS = 2


@dataclass(slots=True)
class _Size:
    """What is known of steps of one padded batch size: seconds by number of drafts, what was
    chosen last, and the current probe."""

    times_s: dict[int, float] = field(default_factory=dict)
    chosen: int | None = None
    probed: int = 0
    probe_steps: int = 0
    probe_budget_s: float = 0.0


class Speculation:
    """Chooses how many drafts to propose and verify, for each number of rows that decode.

    Until the times of all choices are known for a batch size, which warm-up sees to, everything is
    verified.
    """

    def __init__(self, num_drafts: int, widths: Sequence[int], *, adaptive: bool) -> None:
        """`num_drafts` is what the drafter can propose, 0 without one; `widths` are the numbers of
        tokens that a row may have in a step. Not `adaptive`: always verify all drafts.
        """
        self._num_drafts = num_drafts
        self.choices = sorted({0, *(width - 1 for width in widths)})
        self._adaptive = adaptive and num_drafts > 0
        self._rates = [_FIRST_RATE] * num_drafts
        self._seen = [_FIRST_SEEN] * num_drafts
        self._sizes: dict[int, _Size] = {}
        # By batch size and number of drafts, how much faster a batch is as two halves in turn, one
        # drafted for while the other is verified.
        self._gains: dict[tuple[int, int], float] = {}

    def expected_tokens(self, num_drafts: int) -> float:
        """How many tokens a row that verifies so many drafts emits on average."""
        total, reached = 1.0, 1.0
        for rate in self._rates[:num_drafts]:
            reached *= rate
            total += reached
        return total

    def choose(self, decode_rows: int) -> int:
        """How many drafts the next step verifies per row and proposes again; 0 leaves the drafter
        out. `decode_rows` is the padded number of rows that decode.
        """
        num_drafts = self.settled(decode_rows)
        size = self._sizes.get(decode_rows)
        if size is None or size.chosen is None or not self._is_probing(size):
            return num_drafts
        return self._probe(size)

    def settled(self, decode_rows: int) -> int:
        """What `choose` says where it tries nothing out."""
        size = self._sizes.get(decode_rows)
        if not self._adaptive or size is None or len(size.times_s) < len(self.choices):
            return self._num_drafts
        speeds = {
            k: self.expected_tokens(k) / size.times_s[k] * self._gain(decode_rows, k)
            for k in self.choices
        }
        best = max(speeds, key=speeds.__getitem__)
        if size.chosen is None or speeds[best] > speeds[size.chosen] * _BETTER:
            size.chosen = best
        return size.chosen

    def overlaps(self, decode_rows: int, num_drafts: int) -> bool:
        """Whether a batch with so many drafts per row is faster as two halves in turn."""
        return self._gain(decode_rows, num_drafts) > 1

    def observe_overlap(self, decode_rows: int, num_drafts: int, seconds: float) -> None:
        """Half as many rows, verified while the other half was drafted for, took so long; to be
        told right behind `observe_time` of all of them."""
        gain = self._sizes[decode_rows].times_s[num_drafts] / (2 * seconds)
        self._gains[decode_rows, num_drafts] = gain

    def observe_accepted(self, num_drafts: int, num_accepted: int) -> None:
        """One row verified `num_drafts` drafts, of which the first `num_accepted` were right."""
        for i in range(min(num_drafts, num_accepted + 1)):
            self._seen[i] = min(self._seen[i] + 1, _MEMORY)
            self._rates[i] += ((i < num_accepted) - self._rates[i]) / self._seen[i]

    def observe_time(self, decode_rows: int, num_drafts: int, seconds: float) -> None:
        """A step with nothing but `decode_rows` padded rows, each with so many drafts verified and
        proposed, took so long."""
        size = self._sizes.setdefault(decode_rows, _Size())
        known = size.times_s.setdefault(num_drafts, seconds)
        # A step that something else held up says little about its own cost.
        seconds = min(seconds, 2 * known)
        size.times_s[num_drafts] = known + _TIME_SHARE * (seconds - known)
        size.probe_budget_s += _PROBE_SHARE * seconds

    def _gain(self, decode_rows: int, num_drafts: int) -> float:
        gain = self._gains.get((decode_rows, num_drafts), 1.0)
        return gain if gain > _BETTER else 1.0

    def _is_probing(self, size: _Size) -> bool:
        """Whether a probe is under way, or was begun now because the budget allows for it."""
        if size.probe_steps == 0:
            others = [k for k in self.choices if k != size.chosen]
            # In turn, from the one behind the last.
            following = next((k for k in others if k > size.probed), others[0])
            cost_s = _PROBE_STEPS * size.times_s[following]
            if size.probe_budget_s < cost_s:
                return False
            size.probe_budget_s -= cost_s
            size.probed, size.probe_steps = following, _PROBE_STEPS
        return True

    @staticmethod
    def _probe(size: _Size) -> int:
        size.probe_steps -= 1
        return size.probed
