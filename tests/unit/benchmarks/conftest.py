from pathlib import Path

import pytest

from tests.tiny import make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target, and a drafter with K = 4 whose drafts it mostly refuses."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")
