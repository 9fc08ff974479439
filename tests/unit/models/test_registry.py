"""What the config accepts, the registry has a class for."""

from models.config import DRAFTER_ARCHITECTURES, TARGET_ARCHITECTURES
from models.registry import DRAFTERS, TARGETS


def test_every_accepted_architecture_has_a_class() -> None:
    assert set(TARGETS) == set(TARGET_ARCHITECTURES)
    assert DRAFTER_ARCHITECTURES[0] in DRAFTERS
