"""Steps on padding alone, which serve no request: so that everything is compiled and timed."""

import time
from collections import deque
from collections.abc import Callable
from itertools import product

from actors.buckets import BucketLadder
from actors.messages import Bucket, StepPlan
from actors.speculation import Speculation

# Of a step whose time is wanted: the fastest is the one that nothing held up.
_TIMED_RUNS = 3
# So many steps that requests wait for come between two that only warm up new ranks.
_STEPS_BETWEEN = 8


class WarmUp:
    """Runs them through `submit`, which takes a plan and waits for the output of the one before."""

    def __init__(self, ladder: BucketLadder, submit: Callable[[StepPlan], object]) -> None:
        self._ladder, self._submit = ladder, submit
        # Kinds of steps that the ranks have not run yet, though requests are served already.
        self._missing: deque[Bucket] = deque()
        self._steps_left = 0

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Every kind of step once; `on_progress` is told how many of how many are done."""
        buckets = self._ladder.warm_up()
        for done, bucket in enumerate(buckets, start=1):
            self._seconds(bucket)
            if on_progress is not None:
                on_progress(done, len(buckets))

    def measure(self, speculation: Speculation, *, is_dedicated: bool, overlaps: bool) -> None:
        """What each choice of `speculation` costs; of two halves of a batch, too, where it
        `overlaps`."""
        for decode_rows, num_drafts in product(self._ladder.decode_rows, speculation.choices):
            bucket = self._ladder.decode_step(decode_rows, num_drafts)
            if is_dedicated:
                # A step begins behind the exchange of the one before, so that is in its time.
                self._seconds(bucket)
            seconds = min(self._seconds(bucket) for _ in range(_TIMED_RUNS))
            speculation.observe_time(decode_rows, num_drafts, seconds)
            if overlaps and decode_rows > 1 and num_drafts:
                half = self._ladder.decode_step(-(-decode_rows // 2), num_drafts)
                self._seconds(half, defer=True)
                seconds = min(self._seconds(half, defer=True) for _ in range(_TIMED_RUNS))
                speculation.observe_overlap(decode_rows, num_drafts, seconds)

    @property
    def is_missing(self) -> bool:
        """Whether `catch_up` has something to do."""
        return bool(self._missing)

    def postpone(self) -> None:
        """There are new ranks, and requests wait: let `catch_up` do what `run` does."""
        self._missing = deque(self._ladder.warm_up())
        self._steps_left = _STEPS_BETWEEN

    def is_turn(self, *, has_work: bool) -> bool:
        """Whether to `catch_up` behind this step: one of every few, each where none is wanted."""
        self._steps_left -= 1
        return self.is_missing and not (has_work and self._steps_left > 0)

    def catch_up(self) -> None:
        """Run a kind of step that is missing; no output may be unread."""
        self._steps_left = _STEPS_BETWEEN
        self._seconds(self._missing.popleft())

    def _seconds(self, bucket: Bucket, *, defer: bool = False) -> float:
        """How long a step without requests takes, from its submission to its output."""
        plan = StepPlan(step=0, bucket=bucket, defers_drafts=defer)
        start = time.perf_counter()
        self._submit(plan)
        self._submit(StepPlan(step=plan.step))
        return time.perf_counter() - start
