"""Options that several commands share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline_cli.main import main

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its own rights up")


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder of another user."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    return folder


def without_rights(*words: object) -> subprocess.CompletedProcess[str]:
    """Run as a user other than root, with a Python that may be readable by root only."""
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable]
    command += ["-m", "paceline_cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--report"),
        ("evaluate", "--output"),
        ("jobs", "export", "job-1", "-o"),
        ("analyze", "job-1", "--timeline"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_done(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(main, [*words, str(tmp_path / "nowhere" / "file")])
    assert done.exit_code == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in " ".join(done.output.split())


@needs_root
def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "others"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    done = without_rights("demo", "--report", folder / "demo.json")
    assert done.returncode == 2
    assert "nothing can be written into" in done.stderr


@needs_root
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("analyze", "{}/trace.parquet"), "Permission denied"),
        (("analyze", "--flight-recorder", "{}/dumps"), "Permission denied"),
        (("demo", "--report", "{}/demo.json"), "nothing can be written into"),
        (("agent", "--once", "--sysfs", "{}/sys"), "no RDMA ports"),
        (("agent", "--once", "--procfs", "{}/proc"), "tells nothing of the host"),
    ],
)
def test_a_path_in_a_closed_folder_is_one_sentence(
    closed: Path, words: tuple[str, ...], message: str
) -> None:
    done = without_rights(*(word.format(closed) for word in words))
    assert message in done.stderr
    assert "Traceback" not in done.stderr
