"""Engines and models that are loaded once for all tests that share them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray import serve
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.llm import LLM
from models import hub
from tests.integration.demo import demo_args
from tests.tiny import make_pair, train_pair


@pytest.fixture(scope="session")
def plain() -> Iterator[LLM]:
    """The demo target without speculation."""
    with LLM(**demo_args(speculative_config=None)) as llm:
        yield llm


@pytest.fixture(scope="session")
def speculative() -> Iterator[LLM]:
    """The demo pair."""
    with LLM(**demo_args()) as llm:
        yield llm


@pytest.fixture(scope="session")
def transformers_target() -> PreTrainedModel:
    """The demo target as transformers runs it, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        hub.resolve(hub.DEMO_TARGET), dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target with a long context, and a drafter with K = 4 that knows one prompt."""
    pair = make_pair(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=4096)
    train_pair(*pair, [list(range(20, 31))])
    return pair


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of this module's own, with Serve."""
    # Short: Ray puts Unix sockets below it, whose paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory(prefix="dft", ignore_cleanup_errors=True) as temp_dir:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            _temp_dir=temp_dir,
        )
        try:
            serve.start(http_options={"location": "NoServer"})
            yield
        finally:
            serve.shutdown()
            ray.shutdown()
