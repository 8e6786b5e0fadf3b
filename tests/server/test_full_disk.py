"""A server whose database disk is full reports that it is not ready."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MEGABYTE = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid():
        pytest.skip("A FULL DISK IS NOT TESTED: mounting a small tmpfs needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no free block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        size = MEGABYTE
        while size:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2
    return filler


def test_a_full_disk_makes_the_server_unready_until_there_is_space(
    disk: Path, run_server: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    server = run_server(database_url=f"sqlite:///{disk}/paceline.db")

    def missing() -> list[str]:
        found: list[str] = server.client.get("/readyz").json()["missing"]
        return found

    assert missing() == []
    filler = fill(disk)
    wait_for(lambda: any("full" in reason for reason in missing()), "readyz to report it", 60.0)
    assert server.client.get("/readyz").status_code == 503
    filler.unlink()
    wait_for(lambda: missing() == [], "the server to be ready again", 60.0)
