"""Run commands on other nodes: one command per node, or one launcher for all."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline_cli.termination import terminated_as_interrupted

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {node}"
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Ended:
    """Output and status of a command. Times are CLOCK_REALTIME of this machine."""

    output: str
    errors: str
    status: int | None  # None: it did not end in time
    started_ns: int
    ended_ns: int

    @property
    def complaint(self) -> str:
        """Return the last line of stderr."""
        last = self.errors.strip().rpartition("\n")[2][-_SHOWN_CHARACTERS:]
        if self.status is None:
            return f"no answer in time; {last}" if last else "no answer in time"
        return last or f"status {self.status}"


class RemoteCommands:
    """Commands that run in parallel and never outlive this process."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._interrupted = False

    def run(self, commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Ended]:
        """Run the commands. Raises OSError if a program cannot be started."""
        if not commands:
            return {}
        with terminated_as_interrupted(), ThreadPoolExecutor(max_workers=len(commands)) as threads:
            try:
                ends = {
                    name: threads.submit(self._one, command, seconds)
                    for name, command in commands.items()
                }
                return {name: end.result() for name, end in ends.items()}
            except BaseException:
                self._interrupted = True
                for child in list(self._running):
                    _end(child)
                raise

    def _one(self, command: Sequence[str], seconds: float) -> Ended:
        started_ns = time.time_ns()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._running.add(child)
        if self._interrupted:  # interrupted while the commands started
            _end(child)
        status: int | None = None
        try:
            output, errors = child.communicate(timeout=seconds)
            status = child.returncode
        except subprocess.TimeoutExpired:
            _end(child)
            output, errors = child.communicate()
        finally:
            self._running.discard(child)
        return Ended(output, errors, status, started_ns, time.time_ns())


def _end(child: subprocess.Popen[str]) -> None:
    """Kill a command with its local children; remote processes end at their deadline."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class EachNode:
    """One process per node: `template`, with {node} replaced, followed by the command for that
    node.

    `quoted`: ssh passes one string to a remote shell.
    """

    nodes: tuple[str, ...]
    template: str
    quoted: bool = False

    def command(self, node: str, there: Sequence[str]) -> list[str]:
        before = [word.replace("{node}", node) for word in shlex.split(self.template)]
        return [*before, shlex.join(there)] if self.quoted else [*before, *there]


@dataclass(frozen=True, slots=True)
class AllNodes:
    """One launcher that runs a command on every node, such as srun, mpirun or pdsh."""

    launcher: str

    def command(self, there: Sequence[str]) -> list[str]:
        return [*shlex.split(self.launcher), *there]


Reach = EachNode | AllNodes
