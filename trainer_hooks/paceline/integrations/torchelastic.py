"""TorchElastic: reports how ranks of a torchrun job ended, from torchrun's own process.

    PACELINE=1 torchrun train.py

torchrun notices the first ranks that fail, then ends the others. Its events have the exit statuses
only when the job is over, and not for restarts. So the adapter takes them when torchrun begins to
end the others, and hands them to the agent: with the traceback that `@record` wrote, unless the
rank's hooks reported one themselves. The exit code 0 of a rank is handed over while torchrun still
waits for the others: after `os._exit(0)` its hooks saw no end. If a signal asks torchrun to end, it
ends all ranks and starts none again: they are reported with that signal, whatever they do on it.
Ranks may be killed together, and torchrun sees one of them first: the signals that ended the others
and that torchrun does not send are reported once all have ended.

A rank that ends before it records, such as by an error of an import, has no ring. If a rank fails,
the adapter writes the rings that are missing once all have ended: the job is shown. The ring of a
rank that still has none after 10 s is reserved: the server sees that it is loading, while the
others may wait for it in `init_process_group`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec.structs import replace as replace_fields

from paceline.environment import RankEnvironment, identify, locate_rank, read_rank_environment
from paceline.integrations.boundaries import never_raises
from paceline.system_exit import ending_of
from paceline.wrapping import replace
from paceline_wire.ending import Ending, write_ending
from paceline_wire.ring import (
    MINIMUM_CAPACITY,
    STATE_STATUS,
    Identity,
    RingError,
    RingReader,
    Status,
    create,
    reserve,
    set_status,
)

RESERVED_AFTER_SECONDS = 10.0  # most ranks record by then
_TORCHRUN_KILLS_SECONDS = 30.0  # the default of torch's `PContext.close`


def attach(module: ModuleType) -> None:
    """Report the failures of the processes that torchrun starts.

    Args:
        module: `torch.distributed.elastic.multiprocessing.api`.
    """
    replace(module.PContext, "close", _reporting)
    replace(module.PContext, "wait", _reporting_finished)


def _reporting(close_all: Callable[..., Any]) -> Callable[..., Any]:
    def close(self: Any, *args: Any, **options: Any) -> Any:
        if hasattr(self, "_paceline_closed"):
            return close_all(self, *args, **options)
        # Later those that torchrun ended have failed too.
        self._paceline_closed = True
        ends = RankEnds(self)
        ends.report_failures()
        report_finished(self)
        number = _signal_of(sys.exc_info()[1])
        if number is not None:
            report_terminated(self, number)
        result = close_all(self, *args, **options)
        ends.report_unrecorded()
        ends.report_killed(args[1] if len(args) > 1 else options.get("timeout"))
        if number is not None:
            report_terminated(self, number)
        return result

    return close


def _reporting_finished(wait_for_all: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **options: Any) -> Any:
        result = wait_for_all(self, *args, **options)
        if not hasattr(self, "_paceline_closed"):
            report_finished(self)
            report_loading(self)
        return result

    return wait


@never_raises
def report_finished(context: Any) -> None:
    """Write the exit code of the ranks that have ended with 0, each once."""
    finished = {rank for rank, status in _return_codes(context).items() if status == 0}
    reported: set[int] = getattr(context, "_paceline_finished", set())
    context._paceline_finished = reported | finished
    for local_rank in finished - reported:
        _write_ending(context, local_rank, _ending(0))


@never_raises
def report_terminated(context: Any, number: int) -> None:
    """Write that a signal asked torchrun to end, and how its ranks ended, as far as they have.

    Before torchrun ends them, because a rank that exits with 0 then reports that by itself.
    """
    for local_rank, status in _return_codes(context).items():
        ending = Ending() if status is None else _ending(status)
        _write_ending(context, local_rank, replace_fields(ending, launcher_signal=number))


def _signal_of(error: BaseException | None) -> int | None:
    """Return the signal that torch's `SignalException` reports; None if it is another error."""
    is_signal = type(error).__name__ == "SignalException"
    return int(getattr(error, "sigval", 0)) or None if is_signal else None


def _return_codes(context: Any) -> dict[int, int | None]:
    """Return those of the ranks, by local rank; None while one runs.

    Args:
        context: torch's `SubprocessContext`; others have none here.
    """
    handlers = getattr(context, "subprocess_handlers", {})
    return {local_rank: handler.proc.returncode for local_rank, handler in handlers.items()}


def _write_ending(context: Any, local_rank: int, ending: Ending) -> None:
    """Write how a rank ended, if it has a ring."""
    rank = read_rank_environment(_environment(context, local_rank))
    if rank is not None and rank.ring_path.exists():
        write_ending(rank.ring_path, ending)


@never_raises
def report_loading(context: Any) -> None:
    """Reserve, once, the rings of the ranks that have none some time after their start.

    Args:
        context: torch's `PContext`.
    """
    now = time.monotonic()
    due = getattr(context, "_paceline_reserves_at", None)
    if due is None:
        context._paceline_reserves_at = due = now + RESERVED_AFTER_SECONDS
    unrecorded = _unrecorded(context)
    if now < due:
        return
    context._paceline_reserves_at = math.inf
    for local_rank, rank in unrecorded.items():
        if rank.world_size > 1:
            identity = replace_fields(_identity(context, local_rank, rank), is_reserved=True)
            with suppress(FileExistsError):
                reserve(rank.ring_path, identity)


def _unrecorded(context: Any) -> dict[int, RankEnvironment]:
    """Return the ranks that had no ring in any call: the agent deletes that of one that ended."""
    ranks: dict[int, RankEnvironment] | None = getattr(context, "_paceline_unrecorded", None)
    if ranks is None:
        ranks = _ranks(context)
    ranks = {key: rank for key, rank in ranks.items() if not rank.ring_path.exists()}
    context._paceline_unrecorded = ranks
    return ranks


def _ranks(context: Any) -> dict[int, RankEnvironment]:
    """Return the ranks that find an agent, by local rank."""
    return {
        local_rank: rank
        for local_rank in context.envs
        if (rank := read_rank_environment(_environment(context, local_rank))) is not None
    }


def _identity(context: Any, local_rank: int, rank: RankEnvironment) -> Identity:
    """Return the identity of a rank that does not record."""
    words = map(str, context.args[local_rank])
    script = next((word for word in words if not word.startswith("-")), "")
    place = locate_rank(rank.rank, rank.topology, None, {})
    metadata = {"script": Path(script).name}
    identity = identify(rank, *place, metadata, _environment(context, local_rank))
    return replace_fields(identity, pid=context.pids()[local_rank])


def _is_reserved(rank: RankEnvironment) -> bool:
    """Return whether the ring was reserved for the rank, which has not created its own."""
    try:
        with closing(RingReader(rank.ring_path)) as reader:
            return reader.identity.is_reserved
    except RingError:
        return False


def _environment(context: Any, local_rank: int) -> dict[str, str]:
    return {**os.environ, **context.envs[local_rank]}


class RankEnds:
    """How the ranks of one launch ended, if one of them has failed.

    Args:
        context: torch's `PContext`.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._since = time.monotonic()
        self._failures = dict(getattr(context, "_failures", {}))  # `ProcessFailure`, by local rank
        self._unrecorded: dict[int, RankEnvironment] = {}

    @never_raises
    def report_failures(self) -> None:
        """Write how the ranks ended that have failed, before torchrun ends the others."""
        if not self._failures:
            return
        self._unrecorded = _unrecorded(self._context)
        for local_rank, rank in _ranks(self._context).items():
            if local_rank in self._failures and rank.ring_path.exists():
                if _is_reserved(rank):
                    set_status(rank.ring_path, Status.FAILED)
                write_ending(rank.ring_path, _ending_of_failure(self._failures[local_rank]))

    @never_raises
    def report_killed(self, timeout: float | None) -> None:
        """Write the signals that ended other ranks since, but not those that torchrun causes.

        It sends SIGTERM, on which a rank may abort, and SIGKILL to those that have not ended then.

        Args:
            timeout: seconds between both; None: torch's default.
        """
        of_torchrun = {signal.SIGTERM, signal.SIGABRT}
        if time.monotonic() >= self._since + (timeout or _TORCHRUN_KILLS_SECONDS):
            of_torchrun.add(signal.SIGKILL)
        for local_rank, status in _return_codes(self._context).items():
            if local_rank in self._failures or status is None or status >= 0:
                continue
            if -status not in of_torchrun:
                _write_ending(self._context, local_rank, _ending(status))

    @never_raises
    def report_unrecorded(self) -> None:
        """Write the rings of the ranks that recorded nothing, after all have ended.

        How those ended that torchrun itself has ended since stays unknown.
        """
        for local_rank, rank in self._unrecorded.items():
            identity = _identity(self._context, local_rank, rank)
            if local_rank in self._failures:
                write_ending(rank.ring_path, _ending_of_failure(self._failures[local_rank]))
            ring = create(rank.ring_path, identity, MINIMUM_CAPACITY)
            ring.state[STATE_STATUS] = Status.FAILED
            ring.close()


@never_raises
def report_error(error: BaseException) -> None:
    """Write the error that ends this rank, which has no ring, for torchrun's process to report."""
    rank = read_rank_environment()
    if rank is not None and (not rank.ring_path.exists() or _is_reserved(rank)):
        write_ending(rank.ring_path, ending_of(error))


def _ending_of_failure(failure: Any) -> Ending:
    """Return how a rank ended from torch's `ProcessFailure`."""
    status = failure.exitcode
    message = failure.error_file_data.get("message")
    details = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    error = str(details.get("py_callstack", ""))
    return _ending(status, error)


def _ending(status: int, error: str = "") -> Ending:
    """Return how a process ended that `subprocess` gives this return code."""
    return Ending(None, -status, error) if status < 0 else Ending(status, None, error)
