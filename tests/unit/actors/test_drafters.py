"""The life of dedicated drafters, against actors that are fakes."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors import drafters as module
from actors.channel import Address, StepServer
from actors.drafters import RayDrafters
from tests.unit.actors.builders import engine_config

HOST = "127.0.0.1"
WAIT_S = 10.0
_monotonic = time.monotonic


class Cluster:
    """What `RayDrafters` asks of Ray: calls of fake actors are made at once, or when they are
    waited for they raise what was to go wrong."""

    def __init__(self) -> None:
        self.made: list[list[FakeActor]] = []
        self.targets = [FakeActor("t0"), FakeActor("t1")]

    def make(self) -> list[Any]:
        group = len(self.made)
        self.made.append([FakeActor(f"{group}.{rank}") for rank in range(2)])
        return list(self.made[-1])

    @property
    def now(self) -> "list[FakeActor]":
        return self.made[-1]


class Call:
    """The reference to a call's result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work


class FakeActor:
    """`fails` names methods that raise; a killed one raises always."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.is_killed = False
        self.payloads: list[bytes] = []
        self.step_error: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()

    def __getattr__(self, method: str) -> Any:
        class Remote:
            @staticmethod
            def remote(*args: Any) -> Call:
                self.calls.append(method)
                return Call(lambda: self._run(method))

        return Remote

    def _run(self, method: str) -> Any:
        if method == "load":
            assert self.may_load.wait(WAIT_S)
        if self.is_killed or method in self.fails:
            raise RuntimeError(f"{self.name} {method}: the actor died")
        if method == "listen":
            return StepServer(self._step, HOST).address
        return HOST if method == "node_address" else None

    def _step(self, payload: bytes) -> bytes:
        self.payloads.append(payload)
        if self.step_error is not None:
            raise self.step_error
        return b""


class Patience:
    """A clock that tests set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return _monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Patience:
    clock = Patience()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    def get(calls: Any, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is waited for without end"
        return [call.work() for call in calls] if isinstance(calls, list) else calls.work()

    class Context:
        @staticmethod
        def get_node_id() -> str:
            return "node"

    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module.ray, "kill", lambda actor: setattr(actor, "is_killed", True))
    monkeypatch.setattr(module.ray, "get_runtime_context", Context)
    cluster = Cluster()
    yield cluster
    # Behind this they would call the true Ray, which starts at the first call.
    for thread in threading.enumerate():
        if thread.name.startswith("drafters"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def drafters(cluster: Cluster) -> Iterator[RayDrafters]:
    config = engine_config(is_dedicated=True)
    drafters = RayDrafters(config, cluster.make, cluster.targets)
    try:
        yield drafters
    finally:
        drafters.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def joined(drafters: RayDrafters) -> None:
    wait_for(drafters.are_waiting)
    drafters.join()
    assert drafters.are_joined()
    assert not drafters.are_waiting()


def lose(drafters: RayDrafters, cluster: Cluster) -> None:
    """One of them fails in a step."""
    cluster.now[1].step_error = ValueError("no memory")
    before = len(cluster.made)
    drafters.post(b"plan")
    wait_for(lambda: not drafters.are_joined())
    assert all(actor.is_killed for actor in cluster.made[before - 1])


def test_they_load_by_themselves_and_wait_to_be_joined(
    drafters: RayDrafters, cluster: Cluster
) -> None:
    drafters.wait()
    assert drafters.are_waiting()
    assert not drafters.are_joined()
    drafters.post(b"early")
    drafters.join()
    assert drafters.are_joined()
    for actor in cluster.targets:
        assert actor.calls == ["node_address", "join_exchange"]
    for actor in cluster.now:
        assert actor.calls.index("load") < actor.calls.index("join_exchange")
    drafters.post(b"plan")
    wait_for(lambda: [actor.payloads for actor in cluster.now] == [[b"plan"]] * 2)
    assert drafters.are_joined()


@pytest.mark.parametrize("who", ["a rank", "the target's ranks"])
def test_lost_ones_are_ended_and_replaced(
    drafters: RayDrafters, cluster: Cluster, who: str
) -> None:
    joined(drafters)
    if who == "a rank":
        lose(drafters, cluster)
    else:
        drafters.lose()
        assert not drafters.are_joined()
        drafters.lose()
    assert len(cluster.made) == 2, "lost once"
    assert all(actor.is_killed for actor in cluster.made[0])
    assert not any(actor.is_killed for actor in cluster.made[1])
    joined(drafters)
    drafters.post(b"plan")
    wait_for(lambda: cluster.now[0].payloads == [b"plan"])
    assert cluster.made[0][0].payloads in ([], [b"plan"])


def test_the_loss_of_those_that_take_part_is_none_of_those_that_wait(
    drafters: RayDrafters, cluster: Cluster
) -> None:
    """The target's ranks may say late what is known already."""
    joined(drafters)
    lose(drafters, cluster)
    wait_for(drafters.are_waiting)
    drafters.lose()
    assert drafters.are_waiting()
    joined(drafters)


def test_nobody_waits_for_those_that_load(drafters: RayDrafters, cluster: Cluster) -> None:
    joined(drafters)
    make = cluster.make

    def slow() -> list[Any]:
        actors = make()
        actors[0].may_load.clear()
        return actors

    drafters._make_actors = slow
    began = time.monotonic()
    lose(drafters, cluster)
    assert not drafters.are_waiting()
    drafters.post(b"plan")
    assert time.monotonic() - began < WAIT_S / 2
    cluster.now[0].may_load.set()
    joined(drafters)


@pytest.mark.parametrize("method", ["load", "warm_up", "listen", "rendezvous"])
def test_those_that_fail_to_load_are_replaced(cluster: Cluster, method: str) -> None:
    make = cluster.make

    def failing_once() -> list[Any]:
        actors = make()
        if len(cluster.made) == 1:
            actors[0].fails.add(method)
        return actors

    drafters = RayDrafters(engine_config(is_dedicated=True), failing_once, cluster.targets)
    try:
        with pytest.raises(RuntimeError):
            drafters.wait()
        assert not drafters.are_waiting()
        assert all(actor.is_killed for actor in cluster.made[0])
        joined(drafters)
        assert len(cluster.made) == 2
    finally:
        drafters.close()


@pytest.mark.parametrize("who", ["target", "drafter", "listener"])
def test_where_they_are_not_joined_all_targets_leave(
    drafters: RayDrafters, cluster: Cluster, who: str
) -> None:
    drafters.wait()
    match who:
        case "target":
            cluster.targets[1].fails.add("join_exchange")
        case "drafter":
            cluster.now[1].fails.add("join_exchange")
        case "listener":
            loaded = drafters._loaded
            assert loaded is not None
            with socket.create_server((HOST, 0)) as gone:
                port = gone.getsockname()[1]
            loaded.result()[1] = Address(HOST, port, bytes(32))  # type: ignore[index]
    drafters.join()
    assert not drafters.are_joined()
    for actor in cluster.targets:
        assert actor.calls == ["node_address", "join_exchange", "leave_drafters"]
    assert all(actor.is_killed for actor in cluster.made[0])
    cluster.targets[1].fails.clear()
    joined(drafters)


def test_a_target_that_is_gone_is_no_matter_of_the_drafters(
    drafters: RayDrafters, cluster: Cluster
) -> None:
    drafters.wait()
    cluster.targets[0].is_killed = True
    with pytest.raises(RuntimeError, match="t0 leave_drafters"):
        drafters.join()


def test_so_many_losses_in_a_row_are_enough(drafters: RayDrafters, cluster: Cluster) -> None:
    for number in range(1, 7):
        assert len(cluster.made) == number
        joined(drafters)
        lose(drafters, cluster)
    assert len(cluster.made) == 6, "nobody is started in vain for ever"
    assert all(actor.is_killed for actors in cluster.made for actor in actors)
    assert not drafters.are_waiting()
    assert not drafters.are_joined()
    drafters.post(b"plan")
    drafters.lose()
    assert len(cluster.made) == 6


def test_losses_long_apart_are_not_in_a_row(
    drafters: RayDrafters, cluster: Cluster, clock: Patience
) -> None:
    for number in range(1, 13):
        joined(drafters)
        if number % 3 == 0:
            clock.ahead_s += 3600
        lose(drafters, cluster)
    assert len(cluster.made) == 13


@pytest.mark.parametrize("when", ["loading", "waiting", "joined"])
def test_close_ends_all_of_them(cluster: Cluster, when: str) -> None:
    drafters = RayDrafters(engine_config(is_dedicated=True), cluster.make, cluster.targets)
    if when == "loading":
        cluster.now[0].may_load.clear()
    else:
        wait_for(drafters.are_waiting)
    if when == "joined":
        drafters.join()
    drafters.close()
    cluster.now[0].may_load.set()
    assert all(actor.is_killed for actor in cluster.now)
    assert not drafters.are_joined()
    drafters.post(b"plan")
    drafters.close()
    assert len(cluster.made) == 1
