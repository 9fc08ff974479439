"""A random tiny pair that differs from the demo's in every size."""

from pathlib import Path

import pytest

from tests.tiny import make_pair, train_pair

TINY_PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
TINY_K = 6


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An untied Qwen3 target and a drafter that is right part of the time on `TINY_PROMPT`."""
    pair = make_pair(
        tmp_path_factory.mktemp("tiny"),
        "qwen3",
        block_size=TINY_K + 1,
        vocab_size=400,
        num_heads=6,
        num_kv_heads=2,
        max_position_embeddings=1024,
    )
    train_pair(*pair, [TINY_PROMPT, TINY_PROMPT[::-1]])
    return pair
