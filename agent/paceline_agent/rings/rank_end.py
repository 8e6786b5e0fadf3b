"""The end of a rank that the agent did not start: when it is known, and how the rank ended.

The exit status comes from the kernel if it is available (`collect.exit_status`), otherwise from the
report of the rank or of torchrun; without a report it is unknown. A SIGTERM that torchrun has not
reported does not count: torchrun reports the ranks that fail first, and ends the others with it. So
does Slurm, which reports none, and any launcher may end a rank that has already reported an error.

A rank whose exit status the kernel does not show waits for the report of torchrun, as does one with
an exit code, because torchrun may report its error, or with a signal that torchrun may have sent or
received itself. Any other signal is reported without delay, so that ranks that were killed at once
are reported at once.
"""

from __future__ import annotations

import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

from msgspec.structs import replace

from paceline_agent.clock import stepped_ns, timeline_ns
from paceline_agent.collect.exit_status import ExitStatus
from paceline_agent.collect.process_environment import read_environment
from paceline_agent.collect.processes import ProcessKey, is_running, parent_of, session_of
from paceline_wire.batch import RankExited
from paceline_wire.ending import FATAL_SIGNALS, Ending, read_ending, read_fault, reported_ns
from paceline_wire.metadata import SLURM_JOB
from paceline_wire.ring import RingReader

STATUS_SECONDS = 1.0  # torchrun finds the end of a rank ten times a second
UNREAPED_SECONDS = 10.0  # until a torchrun that has not found it has other ends to wait for
_OF_LAUNCHERS = frozenset({SIGTERM, SIGINT, SIGHUP})  # on which torchrun ends its ranks


class RankEnd:
    """The end of the process that writes one ring."""

    def __init__(self, procfs_root: Path, reader: RingReader, pid: int | None) -> None:
        """`pid`: on the node; None if the process is not visible."""
        self._procfs_root = procfs_root
        self._reader = reader
        self._status = ExitStatus(procfs_root, pid)
        self._is_of_torchrun = reader.identity.metadata.get("launcher") == "torchrun"
        self._ends_others = self._is_of_torchrun or SLURM_JOB in reader.identity.metadata
        self._torchrun = None
        if self._is_of_torchrun and pid is not None:
            self._torchrun = _torchrun_of(procfs_root, pid)
        self._gone_since: float | None = None  # monotonic seconds
        self._gone_ns: int | None = None  # the same on the timeline of the events

    def is_awaited(self, has_finished: bool) -> bool:
        """Return whether torchrun may still report how the rank ended, whose process is gone.

        `has_finished`: the rank itself reports that it has finished.
        """
        if not self._is_of_torchrun:
            return False
        ending = self._reported()
        if has_finished or (ending and ending.has_status):
            return False
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since, self._gone_ns = now, timeline_ns()
        code = self._status.read()
        if code is not None and code < 0 and -code not in _OF_LAUNCHERS:
            return False
        is_late = self._status.is_unreaped and code in (None, -SIGTERM)
        return now < self._gone_since + (UNREAPED_SECONDS if is_late else STATUS_SECONDS)

    def event(self, has_finished: bool) -> RankExited:
        """Return the report of the end."""
        identity, path = self._reader.identity, self._reader.path
        ending = self._reported() or Ending()
        code = self._status.read()
        if code is not None and not self._is_consequence(code, ending):
            exit_code, signal = (code, None) if code >= 0 else (None, -code)
            ending = replace(ending, exit_code=exit_code, signal=signal)
        ended_ns = self._gone_ns or timeline_ns()
        error_ns = reported_ns(path) if ending.error else None
        error_ns = ended_ns if error_ns is None else error_ns - stepped_ns()
        has_finished = has_finished and not ending.has_status
        torchrun = self._torchrun
        return RankExited(
            time_ns=ended_ns,
            job=identity.job,
            generation=identity.generation,
            rank=identity.rank,
            since_error_ns=max(ended_ns - error_ns, 0),
            pid=identity.pid,
            exit_code=0 if has_finished else ending.exit_code,
            signal=ending.signal,
            launcher_signal=ending.launcher_signal,
            launcher_gone=torchrun is not None and not is_running(self._procfs_root, torchrun),
            log_tail=self.with_fatal_stack(ending.error, ending.signal),
        )

    def with_fatal_stack(self, log: str, signal: int | None) -> str:
        """Return the log with the Python stack of the rank, if this signal ended it and it left
        one."""
        if signal not in FATAL_SIGNALS:
            return log
        stack = read_fault(self._reader.path, self._reader.status.st_uid)
        return "\n".join(filter(None, (log, stack)))

    def _is_consequence(self, code: int, ending: Ending) -> bool:
        """Return whether what was reported before explains this exit status.

        A rank may end with an exit code of its own after a signal, and with 0 after an error, as
        those of `torch.multiprocessing.spawn` do after Ctrl-C. Its launcher sends SIGTERM also to a
        rank that ends after an error. `ending`: as the rank and torchrun reported it.
        """
        if code >= 0:
            return ending.signal is not None or (code == 0 and bool(ending.exit_code))
        if code != -SIGTERM or not (self._ends_others or ending.error):
            return False
        return ending.signal != SIGTERM and ending.launcher_signal is None

    def _reported(self) -> Ending | None:
        return read_ending(self._reader.path, self._reader.status.st_uid)

    def close(self) -> None:
        self._status.close()


def _torchrun_of(procfs_root: Path, pid: int) -> ProcessKey | None:
    """Return the torchrun that started a rank; None if it is not known.

    It starts a session for each rank. A script between them leads that session, and has the rank's
    environment; otherwise the session is that of torchrun itself or of a terminal.
    """
    leader = session_of(procfs_root, pid)
    if leader is None:
        return None
    if leader != pid and not read_environment(procfs_root, leader, ("RANK",)):
        return None
    return parent_of(procfs_root, leader)
