"""Starts `make serve` as a user does, in a process group of its own, and ends it for good.

Only in a checkout, which has the Makefile.
"""

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from actors.bundles import ROUTER_CPUS
from actors.config import EngineConfig
from benchmarks.nodes import Nodes, cluster

ROOT = Path(__file__).resolve().parents[1]
# With an empty cache a start compiles for minutes.
READY_TIMEOUT_S = 540.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running `make serve`; `temp_dir` is where its Ray cluster keeps its files, and `nodes` are
    that cluster, where it was made for it."""

    http_port: int
    grpc_port: int
    temp_dir: Path
    process: subprocess.Popen[bytes]
    nodes: Nodes | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def log(self) -> str:
        return (self.temp_dir / "serve.log").read_text(errors="replace")


@contextmanager
def serving(args: Mapping[str, Any], *, workers: int = 0) -> Iterator[Server]:
    """`make serve` with `args` for `app.main:build`, ready to answer, ended by Ctrl-C.

    With `workers` it is on a cluster of so many worker nodes, each of which an engine fills, and a
    head node for the rest. Raises `TimeoutError` with the log's end where it does not become ready,
    and `RuntimeError` where Ctrl-C left something running, which is killed then.
    """
    # Short: Ray puts Unix sockets below it, whose paths are limited to about 100 characters.
    temp_dir = Path(tempfile.mkdtemp(prefix="dfs"))
    http_port, grpc_port = free_port(), free_port()
    variables = environment(temp_dir)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        nodes = None
        if workers:
            args, num_cpus = filling(args)
            nodes = stack.enter_context(cluster(workers, num_cpus, variables))
            variables["RAY_ADDRESS"] = nodes.address
        config = write_config(
            temp_dir, args, http_port=http_port, grpc_port=grpc_port, head_only=bool(workers)
        )
        with (temp_dir / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                ["make", "serve", f"CONFIG={config}"],
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(
            http_port=http_port,
            grpc_port=grpc_port,
            temp_dir=temp_dir,
            process=process,
            nodes=nodes,
        )
        try:
            wait_until_ready(server)
            yield server
        finally:
            stop(server)


def filling(args: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """`args` for an engine that fills a node of so many CPUs, which are returned too."""
    num_ranks = EngineConfig.resolve(args).num_ranks
    num_cpus = num_ranks + 1
    # Ray counts in ten-thousandths.
    per_shard = math.floor((num_cpus - ROUTER_CPUS) / num_ranks * 1e4) / 1e4
    return {**args, "cpus_per_shard": per_shard}, num_cpus


def write_config(
    temp_dir: Path,
    args: Mapping[str, Any],
    *,
    http_port: int,
    grpc_port: int,
    head_only: bool = False,
) -> Path:
    """The project's own config file with other ports and `args`. Nodes that share a machine share
    its ports, and only the head can listen there."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = http_port
    config["grpc_options"]["port"] = grpc_port
    config["applications"][0]["args"] = dict(args)
    if head_only:
        config["proxy_location"] = "HeadOnly"
    path = temp_dir / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment(temp_dir: Path) -> dict[str, str]:
    """Ours and what `make serve` sets, with a Ray cluster of its own below `temp_dir`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {
        **os.environ,
        **dict(re.findall(r"(RAY_SERVE_\w+)=(\S+)", makefile)),
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(temp_dir),
        "RAY_metrics_report_interval_ms": "1000",  # ten seconds otherwise
    }


def wait_until_ready(server: Server) -> None:
    """Until /health answers 200."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health", timeout=15).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"not ready after {READY_TIMEOUT_S} s:\n{server.log()[-4000:]}")


def stop(server: Server) -> None:
    """Ctrl-C, as a terminal sends it. Kills what is left after a while, and raises for it."""
    process = server.process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    if server.nodes is not None:
        process.wait(STOP_TIMEOUT_S)
        server.nodes.close()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (left := leftovers(server.temp_dir)) and time.monotonic() < deadline:
        process.poll()  # collects it, so that it is no zombie
        time.sleep(0.2)
    for straggler in left:
        straggler.kill()
    process.wait(STOP_TIMEOUT_S)
    if left:
        raise RuntimeError(f"still running {STOP_TIMEOUT_S} s after SIGINT: {left}")


def leftovers(temp_dir: Path) -> list[psutil.Process]:
    """Processes that still belong to the cluster below `temp_dir`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(temp_dir):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
