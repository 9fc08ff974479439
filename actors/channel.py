"""Carries a rank's steps over a socket of its own.

A plan goes out and an output comes back in every step, and a call of an actor costs a few
milliseconds of the very cores that a CPU rank computes with (docs/decisions.md).
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait

_OK, _FAILED, _COMPILING = b"\0", b"\1", b"\2"
_HEARTBEAT_S = 1.0
_TOKEN_BYTES = 32
# How long whoever connects may take to say its token.
_GREETING_S = 10.0
# A machine that is gone closes nothing: so many seconds of silence, then so many probes.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 11_000,  # milliseconds
}


class StepFailed(RuntimeError):
    """A step raised in its rank, whose error this tells, or the rank is gone."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens. Only who knows `token` is answered."""

    host: str
    port: int
    token: bytes = field(repr=False)


class StepServer:
    """Answers steps with `step`, one after another, on a thread, for the first who has the token;
    ends when that one hangs up."""

    def __init__(
        self,
        step: Callable[[bytes], bytes],
        host: str,
        is_compiling: Callable[[], bool] = lambda: False,
    ) -> None:
        """Listens at `host`, on a port that is free. A step that `is_compiling` says so now and
        then, and its deadline begins anew. Raises `OSError` where it can't listen."""
        self._step, self._is_compiling = step, is_compiling
        self._sending = threading.Lock()
        self._is_stepping = False
        self._listener = Listener((host, 0), "AF_INET")
        bound_host, port = self._listener.address
        self.address = Address(bound_host, port, secrets.token_bytes(_TOKEN_BYTES))
        threading.Thread(target=self._serve, name="steps", daemon=True).start()

    def _serve(self) -> None:
        with self._listener:
            while not self._is_known(connection := self._listener.accept()):
                connection.close()
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(connection, ended), daemon=True)
        beat.start()
        with connection, suppress(EOFError, OSError):  # until the driver hangs up
            while True:
                payload = connection.recv_bytes()
                self._is_stepping = True
                answer = self._answer(payload)
                with self._sending:
                    self._is_stepping = False
                    connection.send_bytes(answer)
        ended.set()

    def _beat(self, connection: Connection, ended: threading.Event) -> None:
        while not ended.wait(_HEARTBEAT_S):
            with self._sending, suppress(OSError):
                if self._is_stepping and self._is_compiling():
                    connection.send_bytes(_COMPILING)

    def _is_known(self, connection: Connection) -> bool:
        _tune(connection)
        try:
            return connection.poll(_GREETING_S) and hmac.compare_digest(
                connection.recv_bytes(_TOKEN_BYTES), self.address.token
            )
        except (EOFError, OSError):
            return False

    def _answer(self, payload: bytes) -> bytes:
        try:
            return _OK + self._step(payload)
        except Exception as error:
            return _FAILED + repr(error).encode()


class StepChannels:
    """The driver's end of all ranks of an engine."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        """Connects to every rank. Raises `OSError` where one is not there."""
        self._connections: list[Connection] = []
        try:
            for address in addresses:
                connection = Client((address.host, address.port), "AF_INET")
                self._connections.append(connection)
                _tune(connection)
                connection.send_bytes(address.token)
        except BaseException:
            self.hang_up()
            raise

    def step(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """What every rank answers, in their order.

        Raises `StepFailed` as soon as any rank fails or is gone: the others may then never answer,
        and `TimeoutError` where one does not answer in time, which begins anew where one compiles.
        """
        self.send(payload)
        deadline = time.monotonic() + timeout_s
        answers: dict[Connection, bytes] = {}
        while waiting := [c for c in self._connections if c not in answers]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = [self._connections.index(c) for c in waiting]
                raise TimeoutError(f"ranks {ranks} did not answer within {timeout_s:g} s")
            for connection in waiting:
                if connection not in ready:
                    continue
                if (answer := self._answer(connection)) is None:
                    deadline = time.monotonic() + timeout_s
                else:
                    answers[connection] = answer
        return [answers[connection] for connection in self._connections]

    def send(self, payload: bytes) -> None:
        """Begin a step that is not waited for. Raises `StepFailed` where a rank is gone."""
        try:
            for connection in self._connections:
                connection.send_bytes(payload)
        except OSError as error:
            raise StepFailed(f"a rank is gone: {error!r}") from error

    def check(self) -> None:
        """Take in what ranks have answered to `send`. Raises `StepFailed` where one has failed or
        is gone."""
        for connection in wait(self._connections, 0):
            assert isinstance(connection, Connection)
            while connection.poll():
                self._answer(connection)

    def hang_up(self) -> None:
        """End a `step` that may be waiting on another thread; what comes after it fails too."""
        for connection in self._connections:
            # Not closed: its number could be another file's before that thread has noticed.
            with suppress(OSError), _socket_of(connection) as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: Connection) -> bytes | None:
        """None where the rank says that it compiles."""
        try:
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise StepFailed(f"a rank is gone: {error!r}") from error
        if answer[:1] == _COMPILING:
            return None
        if answer[:1] != _OK:
            rank = self._connections.index(connection)
            raise StepFailed(f"rank {rank}: {answer[1:].decode(errors='replace')}")
        return answer[1:]


def _tune(connection: Connection) -> None:
    """Send at once, and find out when the other machine is gone."""
    with _socket_of(connection) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # they are Linux's
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _socket_of(connection: Connection) -> socket.socket:
    return socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)
