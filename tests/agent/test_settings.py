"""The defaults of the agent's settings that depend on its user and node."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_agent import settings
from paceline_agent.settings import AgentSettings

NOBODY = 65534


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a directory of the test's user, which is not root: root may write everywhere."""
    with tempfile.TemporaryDirectory(prefix="paceline-settings-") as path:
        if os.getuid() != 0:
            yield Path(path)
            return
        os.chown(path, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, 0)
        try:
            yield Path(path)
        finally:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize(
    ("exists", "mode", "place"),
    [
        (False, 0o555, "home/.local/state/paceline/a/spool"),
        (True, 0o555, "lib/paceline/a/spool"),  # StateDirectory=, the volume of the container
        (False, 0o755, "lib/paceline/a/spool"),
    ],
)
def test_the_spool_is_in_the_state_directory_that_was_created_for_the_agent(
    directory: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, mode: int, place: str
) -> None:
    state = directory / "lib" / "paceline"
    state.parent.mkdir()
    if exists:
        state.mkdir()
    state.parent.chmod(mode)
    monkeypatch.setattr(settings, "_STATE", state)
    monkeypatch.setenv("HOME", str(directory / "home"))
    assert AgentSettings(server_url="http://127.0.0.1:1", agent_id="a").spool == directory / place
    state.parent.chmod(0o755)


def test_the_spool_of_a_user_without_a_home_directory_is_with_the_rings(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_STATE", Path("/proc/nowhere/paceline"))
    monkeypatch.setenv("HOME", "~")
    given = AgentSettings(server_url="http://127.0.0.1:1", agent_id="a")
    assert given.spool == given.directory / "spool"
