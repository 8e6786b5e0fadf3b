"""How a rank's process ended: by itself or as a consequence, and in which words to report it."""

from __future__ import annotations

import re
import signal

from paceline_server.detect.causes.catalog import ENDED_EARLY, OUT_OF_MEMORY, PROCESS_GONE
from paceline_server.detect.observation import ReportedExit
from paceline_server.detect.raised_error import (
    abort_line,
    aborted_by_itself,
    error_line,
    errors_in,
    is_consequence,
    names_device_error,
    names_mismatch,
    raised_by_itself,
)
from paceline_wire.batch import RankExited

# Signals that other programs send. All others are errors of the process itself.
SENT_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_OUT_OF_MEMORY = re.compile(r"out of memory|memoryerror|cannot allocate memory", re.IGNORECASE)


def is_unknown(event: RankExited) -> bool:
    """Return whether the exit status is unknown: another program started the process."""
    return event.exit_code is None and event.signal is None


def is_cause(reported: ReportedExit) -> bool:
    """Return whether the exit is not the consequence of another one.

    A broken connection causes no signal except SIGABRT, with which torch aborts itself. It also
    does that after an error of the device or of the script, which the log names.
    """
    event = reported.event
    if is_unknown(event):
        return False
    if event.signal == signal.SIGABRT:
        return names_device_error(event.log_tail) or raised_by_itself(
            event.log_tail, is_error=_has_reported(event)
        )
    return event.signal is not None or not is_consequence(event.log_tail)


def has_aborted_itself(reported: ReportedExit) -> bool:
    """Return whether the process aborted itself, and no log shows that it lost a connection."""
    event = reported.event
    return event.signal == signal.SIGABRT and aborted_by_itself(event.log_tail)


def has_mismatch(reported: ReportedExit) -> bool:
    """Return whether gloo aborted the rank because ranks entered different collectives."""
    return reported.event.signal == signal.SIGABRT and names_mismatch(reported.event.log_tail)


def way_of_end(event: RankExited) -> tuple[object, ...]:
    """Return a key that is equal for ranks that ended in the same way.

    Numbers in errors are ignored.
    """
    error = error_line(event.log_tail) if event.exit_code is not None else ""
    is_device = names_device_error(event.log_tail)
    return event.exit_code, event.signal, is_device, without_numbers(error)


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)


def ending(event: RankExited) -> str:
    """Return how the process ended, without the error because of which it aborted itself."""
    if event.exit_code == 0:
        return "exit code 0"
    if event.signal is not None:
        return f"killed by {signal_name(event.signal)}"
    return cause_of(event)


def cause_of(event: RankExited) -> str:
    if event.signal is not None:
        quote = ""
        if event.signal == signal.SIGABRT:
            quote = abort_line(event.log_tail, is_error=_has_reported(event))
        return f"killed by {signal_name(event.signal)}" + (f": {quote}" if quote else "")
    if any(map(_OUT_OF_MEMORY.search, errors_in(event.log_tail) or [event.log_tail])):
        return OUT_OF_MEMORY
    if event.exit_code is None:
        return PROCESS_GONE
    if event.exit_code == 0:
        return ENDED_EARLY
    quote = error_line(event.log_tail)
    return f"exit code {event.exit_code}" + (f": {quote}" if quote else "")


def _has_reported(event: RankExited) -> bool:
    """Return whether the log is the error that the rank reported when it ended."""
    return event.since_error_ns > 0


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 99` for a number that this system does not define."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def predicate(cause: str, *, is_plural: bool = False) -> str:
    """Return the predicate of a sentence, such as `was killed by SIGKILL`."""
    if cause.startswith("killed by "):
        return f"{'were' if is_plural else 'was'} {cause}"
    if cause == ENDED_EARLY:
        return "exited with code 0 before the other ranks finished"
    if cause == OUT_OF_MEMORY:
        return "ran out of memory"
    if cause == PROCESS_GONE:
        return "ended with unknown exit code"
    return f"exited with {cause.removeprefix('exit ')}"
