"""Programs that Paceline starts import nothing from the directory that it was started in.

`python -m` and `python -c` search it first, and it may belong to another user, such as /tmp.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paceline_agent.collect.pool import _Worker
from paceline_cli import companions
from paceline_cli.preflight import gpu_facts

SOURCES = ("agent", "cli", "lab/paceline_demo", "server", "trainer_hooks")
PACKAGES = ("msgspec", "paceline", "paceline_agent", "paceline_cli", "paceline_server")
OWN_PYTHON = re.compile(r"(?:sys\.executable|\*python),\s*\"-[mc]\"(?!, \"paceline_trainer\")")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules of other users; the file exists once one was imported."""
    imported = tmp_path / "imported"
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"open({str(imported)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    return imported


def test_the_agent_and_server_beside_a_watched_command(trap: Path, tmp_path: Path) -> None:
    with open(companions.launch([str(tmp_path), str(tmp_path), "--"], {**os.environ})) as report:
        report.read()
    assert not trap.exists()


def test_the_reader_of_gpus(trap: Path, tmp_path: Path) -> None:
    gpu_facts.read_apart(tmp_path)
    assert not trap.exists()


async def test_a_collector_in_a_process_of_its_own(trap: Path) -> None:
    worker = await _Worker.start()
    worker._socket.close()
    await worker.process.wait()
    assert not trap.exists()


def test_every_other_program() -> None:
    root = Path(__file__).parents[2]
    files = [path for name in SOURCES for path in (root / name).rglob("*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if OWN_PYTHON.search(path.read_text())] == []
