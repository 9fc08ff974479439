"""Steps over real sockets, against ranks that are threads of this process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from actors.channel import Address, StepChannels, StepFailed, StepServer

HOST = "127.0.0.1"
PATIENCE_S = 20.0


@contextmanager
def channels(*steps: Callable[[bytes], bytes]) -> Iterator[StepChannels]:
    driver = StepChannels([StepServer(step, HOST).address for step in steps])
    try:
        yield driver
    finally:
        driver.hang_up()


def raises(payload: bytes) -> bytes:
    raise ValueError(f"can't do {payload!r}")


@pytest.mark.parametrize("size", [0, 1, 1000, 16_384, 16_385, 3 << 20])
def test_every_rank_gets_the_payload_and_answers_in_its_place(size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    with channels(lambda p: b"a" + p, lambda p: b"b" + p, lambda p: p[::-1]) as driver:
        for _ in range(3):
            answers = driver.step(payload, PATIENCE_S)
            assert answers == [b"a" + payload, b"b" + payload, payload[::-1]]


def test_a_rank_that_raises_says_what() -> None:
    with (
        channels(bytes, raises) as driver,
        pytest.raises(StepFailed, match=r"rank 1: ValueError.*can't do b'plan'"),
    ):
        driver.step(b"plan", PATIENCE_S)


def test_a_failure_is_not_waited_for_behind_a_rank_that_hangs() -> None:
    never = threading.Event()

    def hangs(payload: bytes) -> bytes:
        never.wait(PATIENCE_S)
        return payload

    started = time.monotonic()
    with channels(hangs, raises) as driver, pytest.raises(StepFailed):
        driver.step(b"", PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    with channels(bytes, hangs) as driver, pytest.raises(TimeoutError, match=r"ranks \[1\].*0.2 s"):
        driver.step(b"", 0.2)
    never.set()


def test_another_thread_can_end_a_step_that_waits() -> None:
    begun, never = threading.Event(), threading.Event()

    def hangs(payload: bytes) -> bytes:
        begun.set()
        never.wait(PATIENCE_S)
        return payload

    with channels(hangs) as driver:

        def hang_up() -> None:
            begun.wait(PATIENCE_S)
            driver.hang_up()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(StepFailed, match="gone"):
            driver.step(b"", PATIENCE_S)
        thread.join()
        with pytest.raises(StepFailed, match="gone"):
            driver.step(b"", PATIENCE_S)
    never.set()


def test_a_rank_that_is_gone_is_noticed() -> None:
    with socket.create_server((HOST, 0)) as listener:
        host, port = listener.getsockname()
        driver = StepChannels([Address(host, port, b"t" * 32)])
        accepted, _ = listener.accept()
        accepted.close()
        with pytest.raises(StepFailed, match="gone"):
            driver.step(b"", PATIENCE_S)
        driver.hang_up()
    with pytest.raises(ConnectionRefusedError):
        StepChannels([Address(host, port, b"t" * 32)])


def test_only_who_has_the_token_is_answered() -> None:
    server = StepServer(bytes, HOST)
    address = server.address
    wrong = Address(address.host, address.port, bytes(len(address.token)))
    stranger = StepChannels([wrong])
    with pytest.raises(StepFailed):
        stranger.step(b"", PATIENCE_S)
    with socket.create_connection((address.host, address.port)) as garbage:
        garbage.sendall(b"\x7f\xff\xff\xffGET / HTTP/1.1\r\n\r\n")
        garbage.settimeout(PATIENCE_S)
        with suppress(ConnectionResetError):
            assert garbage.recv(1) == b""
    driver = StepChannels([address])
    assert driver.step(b"", PATIENCE_S) == [b""]
    driver.hang_up()
    assert repr(address.token) not in repr(server.address), "a log must not hold the token"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_sent_is_not_waited_for() -> None:
    """Every rank gets all of it in its order, whoever is still at the one before."""
    may_go, got = threading.Event(), []

    def slow(payload: bytes) -> bytes:
        assert may_go.wait(PATIENCE_S)
        got.append(payload)
        return b""

    quick: list[bytes] = []

    def at_once(payload: bytes) -> bytes:
        quick.append(payload)
        return b""

    with channels(slow, at_once) as driver:
        for payload in (b"1", b"2", b"3"):
            driver.send(payload)
            driver.check()
        wait_until(lambda: quick == [b"1", b"2", b"3"])
        driver.check()
        assert got == []
        may_go.set()
        wait_until(lambda: got == [b"1", b"2", b"3"])
        driver.check()


def test_an_answer_that_was_not_waited_for_tells_a_failure() -> None:
    def fails_at(payload: bytes) -> bytes:
        return raises(payload) if payload == b"2" else b""

    with channels(bytes, fails_at) as driver:
        for payload in (b"1", b"2"):
            driver.send(payload)
        with pytest.raises(StepFailed, match=r"rank 1: ValueError.*can't do b'2'"):  # noqa: PT012
            while True:
                driver.check()


def test_a_rank_that_is_gone_is_noticed_without_a_step() -> None:
    with socket.create_server((HOST, 0)) as listener:
        host, port = listener.getsockname()
        driver = StepChannels([Address(host, port, b"t" * 32)])
        accepted, _ = listener.accept()
        driver.check()
        accepted.close()
        with pytest.raises(StepFailed, match="gone"):  # noqa: PT012
            while True:
                driver.check()
        with pytest.raises(StepFailed, match="gone"):  # noqa: PT012
            while True:  # the first may still go into the other's buffer
                driver.send(b"plan")
        driver.hang_up()
        with pytest.raises(StepFailed, match="gone"):
            driver.check()


def test_a_rank_that_compiles_gets_more_time() -> None:
    busy = threading.Event()

    def slow(payload: bytes) -> bytes:
        time.sleep(2.5)
        return payload

    def step_within(timeout_s: float) -> list[bytes]:
        driver = StepChannels([StepServer(slow, HOST, busy.is_set).address])
        try:
            return driver.step(b"plan", timeout_s)
        finally:
            driver.hang_up()

    with pytest.raises(TimeoutError):
        step_within(1.5)
    busy.set()
    assert step_within(1.5) == [b"plan"]
