from pathlib import Path

import pytest
import torch

from models.backends import huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def supported() -> bool:
    """Linux 6.1 and later, with huge pages not turned off."""
    release = Path("/proc/sys/kernel/osrelease")
    if not release.is_file() or not THP.is_file() or "[never]" in THP.read_text():
        return False
    major, minor = (int(part) for part in release.read_text().split(".")[:2])
    return (major, minor) >= (6, 1)


def huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(not supported(), reason="this kernel can't collapse pages in place")
def test_memory_moves_and_keeps_its_contents() -> None:
    values = torch.arange(16 << 20, dtype=torch.int32)  # 64 MiB
    before = huge_kib()
    moved = huge_pages.collapse()
    assert moved >= 32 << 20
    assert huge_kib() > before or before >= 32 << 10
    assert torch.equal(values, torch.arange(16 << 20, dtype=torch.int32))


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "maps")
    assert huge_pages.collapse() == 0
