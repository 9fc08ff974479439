"""An engine on two nodes that share no loopback: each in a network namespace of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.nodes import PROMPT, expected_tokens, tiny_args
from tests.tiny import make_pair

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 20
ADDRESSES = ("10.77.0.1", "10.77.0.2")

# Runs on the first node.
DRIVER = """
import json, sys
import ray
from actors.config import EngineConfig
from tests.integration.nodes import placed, seats, tokens_from
args, prompt, max_tokens = json.loads(sys.argv[1])
ray.init(address="10.77.0.1:6379", log_to_driver=False)
config = EngineConfig.resolve(args)
with placed(config) as shards:
    places = seats(shards)
    print(json.dumps([places, tokens_from(config, shards, prompt, max_tokens)]))
ray.shutdown()
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command")
    names = (f"dfa{os.getpid()}", f"dfb{os.getpid()}")
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", names[0], "link", "add", "df0", "type", "veth",
                "peer", "name", "df1", "netns", names[1])  # fmt: skip
            for name, device, address in zip(names, ("df0", "df1"), ADDRESSES, strict=True):
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


def test_ranks_meet_over_a_network(
    namespaces: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = make_pair(tmp_path_factory.mktemp("pair"), "llama", max_position_embeddings=4096)
    args = tiny_args(pair, tensor_parallel_size=2, placement_strategy="SPREAD")
    ray_command = str(Path(sys.executable).with_name("ray"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="dfw", ignore_cleanup_errors=True) as temp_dir:
        log = Path(temp_dir) / "log"
        environment["RAY_TMPDIR"] = temp_dir

        def start(namespace: str, *options: str) -> None:
            command = ["ip", "netns", "exec", namespace, ray_command, "start", "--block",
                       "--num-cpus=2", "--resources={\"neuron_cores\": 1}",
                       "--object-store-memory=100000000", *options]  # fmt: skip
            with log.open("ab") as output:
                started.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

        try:
            start(namespaces[0], "--head", f"--node-ip-address={ADDRESSES[0]}", "--port=6379",
                  "--include-dashboard=false", f"--temp-dir={temp_dir}")  # fmt: skip
            time.sleep(8)
            start(namespaces[1], f"--address={ADDRESSES[0]}:6379",
                  f"--node-ip-address={ADDRESSES[1]}")  # fmt: skip
            time.sleep(8)
            driver = ["ip", "netns", "exec", namespaces[0], sys.executable, "-c", DRIVER]
            done = subprocess.run(
                [*driver, json.dumps([args, PROMPT, MAX_TOKENS])],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
            places, tokens = json.loads(done.stdout.splitlines()[-1])
        finally:
            for process in psutil.process_iter():
                try:
                    if process.environ().get("RAY_TMPDIR") == temp_dir:
                        process.kill()
                except psutil.Error:
                    continue
            for process in started:
                process.wait(30)
    assert sorted(places) == [[address, "0"] for address in ADDRESSES]
    assert tuple(tokens) == expected_tokens(args, PROMPT, MAX_TOKENS)
