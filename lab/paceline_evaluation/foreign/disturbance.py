"""Other work on the machine of a healthy training: processes that use its CPUs and its disk."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline_demo.cluster import start_process

_HOG = "while True: pass"
_WRITER = """
import os, sys, time
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(16):
            file.write(os.urandom(1 << 22))
        file.flush()
        os.fsync(file.fileno())
    time.sleep(0.1)
"""


def start_hog(log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that uses one CPU."""
    return start_process([sys.executable, "-c", _HOG], log, environment)


@contextlib.contextmanager
def disturb(
    hogs: int, *, is_disk_busy: bool, directory: Path, environment: dict[str, str]
) -> Iterator[None]:
    """Run processes that compute, and one that writes if `is_disk_busy`."""
    log = directory / "disturbance.log"
    running = [start_hog(log, environment) for _ in range(hogs)]
    if is_disk_busy:
        command = [sys.executable, "-c", _WRITER, str(directory / "written")]
        running.append(start_process(command, log, environment))
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
