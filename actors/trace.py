"""When host and device did what, to look at in a trace viewer."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DEVICE = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What happened on one track; `duration_s` is None for an instant. Times are perf_counter's."""

    name: str
    track: str
    start_s: float
    duration_s: float | None
    args: dict[str, int]


class Trace:
    """Spans and instants of several threads, in the order in which they ended.

    Tracing is off where there is a None instead.
    """

    def __init__(self) -> None:
        # Only ever appended to, which is atomic.
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str, track: str, **args: int) -> Iterator[dict[str, int]]:
        """Record the time inside the block; it may add to the arguments that it is given."""
        start_s = time.perf_counter()
        try:
            yield args
        finally:
            duration_s = time.perf_counter() - start_s
            self._add(name, track, start_s, duration_s, args)

    def instant(self, name: str, track: str, **args: int) -> None:
        """Record that something happened now."""
        self._add(name, track, time.perf_counter(), None, args)

    def idle_gaps_s(self) -> list[float]:
        """How long the device did nothing between each two spans of consecutive step numbers.

        That includes waiting for requests: trace one busy stretch.
        """
        device = [span for span in self.spans if span.track == DEVICE]
        return [
            after.start_s - (before.start_s + (before.duration_s or 0.0))
            for before, after in pairwise(device)
            if after.args["step"] == before.args["step"] + 1
        ]

    def save(self, path: Path) -> None:
        """Write Chrome's trace JSON, which Perfetto opens: one thread per track."""
        spans = list(self.spans)
        tracks = list(dict.fromkeys(span.track for span in spans))
        events = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(tracks)
        ]
        events += [_event(span, tracks.index(span.track)) for span in spans]
        path.write_text(json.dumps({"traceEvents": events}))

    def _add(
        self,
        name: str,
        track: str,
        start_s: float,
        duration_s: float | None,
        args: dict[str, int],
    ) -> None:
        self.spans.append(
            Span(name=name, track=track, start_s=start_s, duration_s=duration_s, args=args)
        )


def _event(span: Span, tid: int) -> dict[str, object]:
    """A complete event, or an instant of its thread; timestamps are microseconds."""
    kind: dict[str, object] = {"ph": "i", "s": "t"}
    if span.duration_s is not None:
        kind = {"ph": "X", "dur": span.duration_s * 1e6}
    return {
        "name": span.name,
        "pid": 1,
        "tid": tid,
        "ts": span.start_s * 1e6,
        "args": span.args,
        **kind,
    }
