"""A dedicated drafter's rank in this process, beside a target's that is played by hand."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from actors.buckets import BucketLadder
from actors.config import EngineConfig
from actors.drafter_shard import DrafterShard
from actors.messages import StepPlan, encode
from models.drafting import DrafterRank, DraftInputs
from models.exchange import Exchange, ExchangeShape, join_exchange
from tests.tiny import make_pair

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target, drafter = make_pair(tmp_path_factory.mktemp("pair"), "qwen3")
    speculative = {"method": "dflash", "model": str(drafter), "placement": "dedicated"}
    args: dict[str, Any] = {
        "model": str(target),
        "speculative_config": speculative,
        "max_model_len": 32,
        "max_num_seqs": 2,
        "backend": "eager",
        "threads_per_shard": 1,
        "exchange_timeout_s": 20.0,
    }
    return EngineConfig.resolve(args)


@pytest.fixture
def joined(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DrafterShard, Exchange]]:
    """It and the exchange of the target's only rank."""
    shard = DrafterShard(config, 0)
    try:
        shard.load()
        shard.warm_up()
        address = shard.open_exchange(HOST)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(shard.join_exchange, address, HOST)
            exchange = join_exchange(address, HOST, 0, 1, 1, config.exchange_timeout_s)
            joining.result()
        yield shard, exchange
    finally:
        shard.close()


def test_an_empty_plan_is_no_step(joined: tuple[DrafterShard, Exchange]) -> None:
    shard, _ = joined
    assert shard.step(encode(StepPlan(step=1))) == b""


def test_a_rank_that_raises_keeps_nobody_waiting(
    config: EngineConfig,
    joined: tuple[DrafterShard, Exchange],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process lives on, so that nothing else would tell the target's ranks."""

    def failing(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(DrafterRank, "draft", failing)
    shard, exchange = joined
    assert config.drafter is not None
    bucket = BucketLadder.for_config(config).decode_step(1, config.num_drafts)
    rows, block = bucket.emitting_rows, config.drafter.block_size
    width = len(config.drafter.capture_layer_ids) * config.drafter.target_hidden_size
    sent = DraftInputs.unpack(
        torch.zeros(bucket.num_tokens, width),
        torch.zeros(2 * bucket.num_tokens + rows * (block + 2), dtype=torch.int32),
        rows,
    )
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(shard.step, encode(StepPlan(step=1, bucket=bucket)))
        exchange.send(sent)
        with pytest.raises(MemoryError):
            stepping.result()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        exchange.receive_back(ExchangeShape.of(sent, config.num_drafts))
    assert time.monotonic() - began < 5
