"""A virtual environment with one peer, which uses the torch of this one.

A peer's dependencies must not change what Paceline is measured with, and the other way round:
torch does not load Paceline's entry point there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline_demo.cluster import MARK, die_with_parent, processes_with

_INSTALL_SECONDS = 180


class PeerError(RuntimeError):
    """A peer cannot be installed."""


@contextmanager
def peer_environment(requirement: str) -> Iterator[Path]:
    """Install a peer. Yield the directory of its programs.

    Raises:
        PeerError: it cannot be installed.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _run(sys.executable, "-m", "venv", "--without-pip", str(directory))
        own = sysconfig.get_path("purelib", "venv", {"base": name, "platbase": name})
        Path(own, "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        python = str(directory / "bin" / "python")
        _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", requirement)
        yield directory / "bin"


def _run(*command: str) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"was not installed within {_INSTALL_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or f"exit status {error.returncode}").splitlines()[-1]
        raise PeerError(f"cannot be installed: {last}") from error


class PeerProcesses:
    """Processes of one peer in one directory; `close` kills all of them, and what they started."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program whose output goes to `log` in the directory."""
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # Paceline's is not installed there
                    MARK: self._mark,
                    **environment,
                },
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kill until none is left: some are daemons of their own session."""
        while pids := processes_with(MARK, self._mark):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
