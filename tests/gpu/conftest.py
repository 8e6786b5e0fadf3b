"""Tests that need a CUDA device; without one they are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline_wire.ring import RingReader

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(absent)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RingReader]:
    """Hooks that record in this process while the device is already in use."""
    monkeypatch.setenv("PACELINE_RING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PACELINE_JOB", "local")
    for name in ("RANK", "WORLD_SIZE", "PACELINE_GENERATION"):
        monkeypatch.delenv(name, raising=False)
    torch.cuda.init()
    paceline.init()
    reader = RingReader(tmp_path / "local.g0.r0.ring")
    yield reader
    paceline.finish()
    reader.close()


@pytest.fixture
def no_synchronize(reader: RingReader) -> Iterator[None]:
    """Raise an error at any call that makes the host wait for the device."""
    for _ in paceline.steps([0]):  # the hooks wait once, at their first boundary
        pass
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
