"""Spawned processes that run ranks of one engine, driven over pipes."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from actors.config import EngineConfig
from actors.drafter_shard import DrafterShard
from actors.engine import DrafterGroup, Engine
from actors.messages import GenerateRequest, TokenChunk
from actors.shard import Shard
from models.parallel import TensorParallel

_TIMEOUT_S = 120


class RankProcesses:
    """`run` calls one function on the first `size` processes at once."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, size: int, work: Callable[..., Any], *args: object) -> list[Any]:
        """What `work(memory, rank, size, *args)` returned on each rank; `memory` is a dict that
        the process keeps. Raises RuntimeError where a rank raised."""
        self.begin(size, work, *args)
        return self.finish(size)

    def begin(self, size: int, work: Callable[..., Any], *args: object) -> None:
        """`run` without waiting. Raises OSError where a process is gone."""
        for rank, pipe in enumerate(self._pipes[:size]):
            pipe.send((work, (rank, size, *args)))

    def finish(self, size: int) -> list[Any]:
        """What the work that was begun first returned on each rank. Raises RuntimeError where a
        rank raised, EOFError where it is gone."""
        answers = []
        for pipe in self._pipes[:size]:
            if not pipe.poll(_TIMEOUT_S):
                raise RuntimeError("a rank did not answer")
            answers.append(pipe.recv())
        for failed, answer in answers:
            if failed:
                raise RuntimeError(answer)
        return [answer for _, answer in answers]

    def check(self) -> None:
        """Take in what has been answered to `begin`. Raises RuntimeError where a rank raised,
        EOFError where it is gone."""
        for pipe in self._pipes:
            while pipe.poll():
                failed, answer = pipe.recv()
                if failed:
                    raise RuntimeError(answer)

    def signal(self, rank: int, signal_number: int) -> None:
        """Send one process a signal."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal_number)

    def close(self) -> None:
        """End every process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
        self.kill()

    def kill(self) -> None:
        """End every process at once, whatever it does."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()


class ProcessShards:
    """An engine's `ShardGroup` whose ranks are `actors.shard.Shard` in processes."""

    drafters: DrafterGroup | None = None

    def __init__(self, processes: RankProcesses, config: EngineConfig) -> None:
        self._processes, self._size = processes, config.tensor_parallel_size
        self.bytes_read: list[int] = processes.run(self._size, _load, config, free_address())

    def step(self, payload: bytes) -> bytes:
        """The output of the step before, which must be the same on every rank."""
        outputs: list[bytes] = self._processes.run(self._size, _step, payload)
        assert len(set(outputs)) == 1, "ranks disagree"
        return outputs[0]

    def seal(self) -> None:
        self._processes.run(self._size, _seal)

    def close(self) -> None:
        self._processes.run(self._size, _close)


class ProcessDrafters:
    """A `DrafterGroup` of `actors.drafter_shard.DrafterShard` in processes.

    Others come when a test calls `replace`, so that it knows when they do.
    """

    def __init__(self, config: EngineConfig, targets: RankProcesses) -> None:
        self._config, self._targets = config, targets
        self._size = config.drafter_parallel_size
        self._meeting_point = ""
        self._waiting: RankProcesses | None = None
        self.joined: RankProcesses | None = None
        self.num_joins = self.num_losses = 0
        self.delay_s = 0.0  # between the drafters' plan and the target's

    def replace(self, processes: RankProcesses) -> None:
        """Let drafters in the first of these processes wait to be joined."""
        address = free_address()
        (self._meeting_point, *_) = processes.run(self._size, _load_drafter, self._config, address)
        self._waiting = processes

    def are_joined(self) -> bool:
        if self.joined is not None:
            try:
                self.joined.check()
            except (RuntimeError, EOFError, OSError):
                self.lose()
        return self.joined is not None

    def are_waiting(self) -> bool:
        return self._waiting is not None

    def join(self) -> None:
        processes, self._waiting = self._waiting, None
        assert processes is not None
        num_targets = self._config.tensor_parallel_size
        with suppress(OSError):  # the target's ranks find out
            processes.begin(self._size, _join, self._meeting_point)
        try:
            self._targets.run(num_targets, _join, self._meeting_point)
            processes.finish(self._size)
        except (RuntimeError, EOFError, OSError):
            processes.kill()
            self._targets.run(num_targets, _leave_drafters)
            self.num_losses += 1
            return
        self.joined, self.num_joins = processes, self.num_joins + 1

    def lose(self) -> None:
        if self.joined is not None:
            self.joined.kill()
            self.joined, self.num_losses = None, self.num_losses + 1

    def post(self, payload: bytes) -> None:
        """Let them take part in a step, which is not waited for."""
        if self.joined is None:
            return
        try:
            self.joined.begin(self._size, _step, payload)
        except OSError:
            self.lose()
        time.sleep(self.delay_s)

    def close(self) -> None:
        """Let go of the models; the processes are the test's."""
        for processes in (self._waiting, self.joined):
            if processes is not None:
                processes.check()
                processes.run(self._size, _close)


class DedicatedShards(ProcessShards):
    """Target ranks in some processes, beside drafters that are in others."""

    def __init__(
        self, processes: RankProcesses, drafters: RankProcesses | None, config: EngineConfig
    ) -> None:
        """Without `drafters` the engine begins without any."""
        super().__init__(processes, config)
        self.drafters: ProcessDrafters = ProcessDrafters(config, processes)
        if drafters is not None:
            self.drafters.replace(drafters)
            self.drafters.join()
            assert self.drafters.are_joined()

    def step(self, payload: bytes) -> bytes:
        self.drafters.post(payload)
        return super().step(payload)

    def close(self) -> None:
        super().close()
        self.drafters.close()


def generate_on(
    processes: RankProcesses, config: EngineConfig, messages: Sequence[GenerateRequest]
) -> list[list[TokenChunk]]:
    """The chunks of each request of an engine whose ranks run there."""
    shards = ProcessShards(processes, config)
    chunks: list[TokenChunk] = []
    try:
        engine = Engine(config, shards, chunks.extend)
        engine.add_all(messages)
        while engine.step():
            pass
    finally:
        shards.close()
    return [
        [chunk for chunk in chunks if chunk.request_id == message.request_id]
        for message in messages
    ]


def free_address() -> str:
    """A `host:port` of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def collectives(_memory: dict[str, Any], rank: int, size: int, address: str) -> dict[str, Any]:
    """What `TensorParallel` makes of small tensors that differ by rank, as lists."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)
    try:
        tp = TensorParallel(rank, size, dist.group.WORLD)
        x = torch.arange(6.0).view(2, 3) + 10 * rank
        strided = x.t()
        return {
            "sum": tp.all_reduce(x).tolist(),
            "strided sum": tp.all_reduce(strided).tolist(),
            "rows": tp.all_gather(x, dim=0).tolist(),
            "columns": tp.all_gather(x, dim=-1).tolist(),
            "strided columns": tp.all_gather(strided, dim=1).tolist(),
            "operand": x.tolist(),
        }
    finally:
        dist.destroy_process_group()


def _load(memory: dict[str, Any], rank: int, _size: int, config: EngineConfig, address: str) -> int:
    memory["shard"] = Shard(config, rank)
    memory["shard"].load(address)
    bytes_read: int = memory["shard"].bytes_read
    return bytes_read


def _load_drafter(
    memory: dict[str, Any], rank: int, size: int, config: EngineConfig, address: str
) -> str:
    memory["shard"] = DrafterShard(config, rank)
    memory["shard"].load(address if size > 1 else None)
    if rank > 0:
        return ""
    meeting_point: str = memory["shard"].open_exchange("127.0.0.1")
    return meeting_point


def _join(memory: dict[str, Any], _rank: int, _size: int, store: str) -> None:
    memory["shard"].join_exchange(store, "127.0.0.1")


def _leave_drafters(memory: dict[str, Any], _rank: int, _size: int) -> None:
    memory["shard"].leave_drafters()


def _step(memory: dict[str, Any], _rank: int, _size: int, payload: bytes) -> bytes:
    output: bytes = memory["shard"].step(payload)
    return output


def _seal(memory: dict[str, Any], _rank: int, _size: int) -> None:
    memory["shard"].seal()


def _close(memory: dict[str, Any], _rank: int, _size: int) -> None:
    memory.pop("shard").close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    memory: dict[str, Any] = {}
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            # Nothing to tidy up, and an interpreter with torch in it takes seconds to end.
            os._exit(0)
        try:
            answer = False, work(memory, *args)
        except Exception:
            answer = True, traceback.format_exc()
        pipe.send(answer)
