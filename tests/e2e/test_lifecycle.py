"""How `make serve` begins and ends: bad configurations, Ctrl-C in the middle of a stream."""

import json
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.server import ROOT, environment, free_port, leftovers, serving, write_config
from models.hub import DEMO_DRAFTER, DEMO_TARGET
from tests.e2e import client


def speculative(model: str, **fields: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "dflash", "model": model, **fields}}


BAD: dict[str, tuple[Mapping[str, Any], list[str]]] = {
    # args, what the line has to name
    "unknown key": ({"max_model_length": 100}, ["max_model_length", "unknown field", "100"]),
    "wrong type": ({"max_num_seqs": "eight"}, ["max_num_seqs", "integer", "eight"]),
    "over the limit": ({"max_model_len": 9000}, ["max_model_len", "9000", "8192"]),
    "more drafts than trained": (
        speculative(DEMO_DRAFTER, num_speculative_tokens=12),
        ["num_speculative_tokens", "12", "9"],
    ),
    "no such checkpoint": ({"model": "./nowhere"}, ["./nowhere"]),
}


def assert_refused(args: Mapping[str, Any], names: list[str], temp_dir: Path) -> None:
    config = write_config(temp_dir, args, http_port=free_port(), grpc_port=free_port())
    done = subprocess.run(
        ["make", "serve", f"CONFIG={config}"],
        cwd=ROOT,
        env=environment(temp_dir),
        capture_output=True,
        text=True,
        timeout=180,
        start_new_session=True,
    )
    assert done.returncode != 0
    line, *from_make = done.stderr.splitlines()
    assert line.startswith("bad configuration:")
    for name in names:
        assert name in line
    assert all(other.startswith("make") for other in from_make), done.stderr
    assert "Traceback" not in done.stdout
    assert list(temp_dir.iterdir()) == [config], "Ray was started"
    assert leftovers(temp_dir) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_is_one_line(name: str, tmp_path: Path) -> None:
    args, names = BAD[name]
    assert_refused({"model": DEMO_TARGET, **args}, names, tmp_path)


def test_a_drafter_of_another_target_is_refused(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hidden_size = json.loads((tiny_pair[1] / "config.json").read_text())["hidden_size"]
    args = {"model": DEMO_TARGET, **speculative(str(tiny_pair[1]))}
    assert_refused(args, ["hidden size", str(hidden_size), "576"], tmp_path)


def test_ctrl_c_in_the_middle_of_a_stream_leaves_nothing(tiny_pair: tuple[Path, Path]) -> None:
    target, drafter = tiny_pair
    args = {"model": str(target), "served_model_name": "tiny", **speculative(str(drafter))}
    begun, stopped = threading.Event(), threading.Event()

    def read(url: str) -> None:
        body = {
            "model": "tiny",
            "prompt": [7],
            "max_tokens": 1000,
            "ignore_eos": True,
            "temperature": 0,
        }
        while not stopped.is_set():
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60
            ) as response:
                for _ in response.iter_lines():
                    begun.set()

    def read_until_the_end(url: str) -> None:
        try:
            read(url)
        except httpx.HTTPError:
            return

    with serving({**args, "backend": "eager"}) as server:
        listening = {c.laddr.ip for c in listeners() if c.laddr.port == server.http_port}
        assert listening == {"127.0.0.1"}
        reader = threading.Thread(target=read_until_the_end, args=(server.url,))
        reader.start()
        assert begun.wait(client.TIMEOUT_S)
    # `serving` has sent SIGINT to the process group, and raises where it found anything left.
    stopped.set()
    reader.join(client.TIMEOUT_S)
    assert not reader.is_alive(), "a stream hangs although its server is gone"
    assert leftovers(server.temp_dir) == []
    for port in (server.http_port, server.grpc_port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def listeners() -> list[Any]:
    return [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
