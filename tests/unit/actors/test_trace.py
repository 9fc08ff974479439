"""Traces: what is recorded, what a viewer gets, and how long the device was idle."""

import json
import time
from pathlib import Path

import pytest

from actors.trace import DEVICE, Span, Trace


def device_step(step: int, start_s: float, duration_s: float) -> Span:
    return Span(
        name="step", track=DEVICE, start_s=start_s, duration_s=duration_s, args={"step": step}
    )


def test_a_span_is_the_time_inside_the_block() -> None:
    trace = Trace()
    before = time.perf_counter()
    with trace.span("schedule", "engine") as args:
        time.sleep(0.01)
        args["step"] = 7
    after = time.perf_counter()
    (span,) = trace.spans
    assert (span.name, span.track, span.args) == ("schedule", "engine", {"step": 7})
    assert span.duration_s is not None
    assert span.duration_s >= 0.01
    assert before <= span.start_s <= span.start_s + span.duration_s <= after


def test_a_span_that_fails_is_recorded_too() -> None:
    trace = Trace()
    with pytest.raises(RuntimeError), trace.span("step", DEVICE, step=1):
        raise RuntimeError
    assert [span.args for span in trace.spans] == [{"step": 1}]


def test_idle_gaps_lie_between_consecutive_steps_of_the_device() -> None:
    trace = Trace()
    trace.spans += [device_step(1, 10.0, 1.0), device_step(2, 11.5, 2.0)]
    trace.instant("read", "engine", step=1)
    trace.spans += [device_step(3, 13.5, 1.0), device_step(7, 90.0, 1.0), device_step(8, 91.25, 1)]
    assert trace.idle_gaps_s() == [0.5, 0.0, 0.25]


def test_without_steps_there_are_no_gaps() -> None:
    assert Trace().idle_gaps_s() == []


def test_a_saved_trace_is_what_viewers_read(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("schedule", "engine", step=2):
        trace.instant("read", "engine", step=1)
    trace.spans.append(device_step(2, 1.5, 0.25))
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(names.values()) == [DEVICE, "engine"]
    found = {(e["name"], e["ph"], names[e["tid"]], e["args"]["step"]) for e in events[2:]}
    assert found == {
        ("schedule", "X", "engine", 2),
        ("read", "i", "engine", 1),
        ("step", "X", DEVICE, 2),
    }
    (step,) = (e for e in events if e["name"] == "step")
    assert (step["ts"], step["dur"]) == (1.5e6, 0.25e6)
    assert len({e["pid"] for e in events}) == 1
