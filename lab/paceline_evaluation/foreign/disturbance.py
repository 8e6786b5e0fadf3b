"""Other work on the machine of a healthy training: processes that use its CPUs and its disk."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline_demo.cluster import start_process

_HOG = "while True: pass"
_HOG_AT_TIMES = """
import random, time
while True:
    time.sleep(random.uniform(2, 15))
    until = time.monotonic() + random.uniform(2, 15)
    while time.monotonic() < until:
        pass
"""
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


def start_hog(
    log: Path, environment: dict[str, str], *, at_times: bool = False
) -> subprocess.Popen[bytes]:
    """Start a process that uses one CPU, all the time or for some seconds at a time."""
    script = _HOG_AT_TIMES if at_times else _HOG
    return start_process([sys.executable, "-c", script], log, environment)


@contextlib.contextmanager
def disturb(
    hogs: int,
    *,
    at_times: bool = False,
    is_disk_busy: bool,
    directory: Path,
    environment: dict[str, str],
) -> Iterator[None]:
    """Run processes that compute (see `start_hog`), and one that writes if `is_disk_busy`."""
    log = directory / "disturbance.log"
    running = [start_hog(log, environment, at_times=at_times) for _ in range(hogs)]
    if is_disk_busy:
        command = [sys.executable, "-c", _WRITER, str(directory / "written")]
        running.append(start_process(command, log, environment))
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
