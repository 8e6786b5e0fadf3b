"""Copies in memory are off, but in the tests that are about them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MEMORY_DIRECTORY", "")
