"""The error that ended a rank, read from its last lines of output.

Python reports it in a traceback. C++ reports an exception that nothing caught as `terminate called
after throwing an instance of 'TYPE'` and, in the next line, `what():  TEXT`, and aborts the
process: so end a thread of NCCL or gloo that lost its peer, timed out or found an error of the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

_CONSEQUENCE = re.compile(
    r"connection (reset|closed|refused|was closed)|broken pipe|closed by (peer|remote)"
    r"|remote (peer|process) (exited|closed)|socket ?error|nccl.*(remote|system) error|timed? ?out"
    r"|gloo.*(enforce|transport)|\[gloo|processgroup|not? heartbeat|monitoredbarrier"
    r"|dist(backend|network|store)error|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
# Reports of CUDA and NCCL about the rank's own device or node, in whichever error they are found.
_OWN = re.compile(
    r"cuda (error|failure)(?!: driver shutting down)|shared memory segment|no space left on device",
    re.IGNORECASE,
)
# The line after "Last error:" says what it was.
_NCCL_ERROR = re.compile(r"(.*NCCL error) in: \S+, (.*), NCCL version.*")
_NCCL_DETAIL = "Last error:"
_MISMATCH = re.compile(r"Received data size doesn't match expected size")
# torch.utils.data reports a worker that died; it may notice that by a broken connection.
LOADER_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # PyTorch writes it before each line of a traceback
_TRACEBACK = "Traceback (most recent call last):"
# torch quotes the traceback of a DataLoader worker or a replica in the error that it raises.
_ORIGINAL = f"Original {_TRACEBACK}"
_TERMINATED = re.compile(r"terminate called (?:after throwing an instance of '(.*)')?.*")
_WHAT = re.compile(r"\s*what\(\):\s*(.*)")
# Lines of torch's logger (E: error, F: fatal) with which NCCL's watchdog announces the abort.
_LOGGED = re.compile(r"(?:\[rank\d+\]:)?\[([EF])\d{4} [^]]*ProcessGroupNCCL\.cpp:\d+\] *(.*)")
_WATCHDOG = re.compile(
    r"(?:\[(?:PG [^]]*)?Rank \d+\] *)+"
    r"(?:Process group watchdog thread terminated with exception: *)?(?:\[Rank \d+\] *)*"
)
_ABORTS = re.compile(r"watchdog thread terminated with exception|Watchdog caught collective")
_TIMED_OUT = "Watchdog caught collective operation timeout"
_DEVICE_ASSERTION = re.compile(r": block: \[[\d,]+\], thread: \[[\d,]+\] (Assertion .*)")
_ASSERTED = "device-side assert triggered"
_CPP_FRAME = "frame #"
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_MAX_QUOTE_LENGTH = 200


def error_line(log_tail: str) -> str:
    """Return the line that names the error; without an error, the last line.

    If a traceback has several errors, the last one that is not the consequence of a peer's end.
    """
    raised = [error.text for error in _raised_errors(log_tail)]
    return _first_cause(raised, _thrown_errors(log_tail), log_tail) or _last_line(log_tail)


def abort_line(log_tail: str) -> str:
    """Return the error because of which a process aborted itself; empty if it names none.

    A traceback counts if nothing caught its error, or if that is about the device: a script also
    logs errors that it handles.
    """
    raised = [error.text for error in _raised_errors(log_tail) if _ends_process(error)]
    return _first_cause(raised, _thrown_errors(log_tail), log_tail)


def is_consequence(log_tail: str) -> bool:
    """Return whether the rank failed because its connection to a peer broke.

    The first error of a traceback decides, because errors raised while it was handled follow from
    it. Without a traceback, all lines are searched.
    """
    errors = [error.text for error in _raised_errors(log_tail)]
    if any(map(LOADER_WORKERS.search, errors)):
        return False
    return _follows(errors[0] if errors else log_tail)


def raised_by_itself(log_tail: str) -> bool:
    """Return whether an error that nothing caught, and that no peer caused, ended the rank."""
    errors = _raised_errors(log_tail)
    return bool(errors) and errors[0].is_uncaught and not _follows(errors[0].text)


def names_device_error(log_tail: str) -> bool:
    """Return whether CUDA or NCCL report an error of the rank's own device or node."""
    return _OWN.search(log_tail) is not None


def aborted_by_itself(log_tail: str) -> bool:
    """Return whether nothing in the log shows that a process aborted itself because of its peers.

    gloo's error about a mismatch is an exception: other ranks caused it, but no connection broke.
    """
    errors = [*(error.text for error in _raised_errors(log_tail)), *_thrown_errors(log_tail)]
    return not any(map(_follows, errors)) or names_mismatch(log_tail)


def names_mismatch(log_tail: str) -> bool:
    """Return whether gloo aborted the rank because its peers entered another collective or size."""
    return any(map(_MISMATCH.search, _thrown_errors(log_tail)))


def names_timeout(error: str) -> bool:
    """Return whether NCCL's watchdog aborted the rank because a collective did not complete."""
    return _TIMED_OUT in error


def _follows(text: str) -> bool:
    return _CONSEQUENCE.search(text) is not None and _OWN.search(text) is None


class _Raised(NamedTuple):
    """An error of a traceback. torch starts each line of one that nothing caught with `[rank0]:`"""

    text: str
    is_uncaught: bool


def _ends_process(error: _Raised) -> bool:
    return error.is_uncaught or names_device_error(error.text)


def _first_cause(raised: Sequence[str], thrown: Sequence[str], log_tail: str) -> str:
    """Return the error that the others follow from, with the assertion if one failed on the GPU."""
    own_raised = [error for error in raised if not _follows(error)]
    own_thrown = [error for error in thrown if not _follows(error)]
    error = next(chain(reversed(own_raised), own_thrown, reversed(raised), thrown), "")
    if error.endswith(_ASSERTED) and (failed := _DEVICE_ASSERTION.search(log_tail)):
        error = f"{error} ({failed[1].rstrip('.')})"
    return error[:_MAX_QUOTE_LENGTH]


def _raised_errors(log_tail: str) -> list[_Raised]:
    """Return the errors of the last traceback in the order in which they were raised.

    Each with the first line of its message, or the first two if the first one ends with a colon.
    """
    errors: list[_Raised] = []
    is_open = is_linked = is_announced = False
    before = ""
    for text in log_tail.splitlines():
        line = _RANK_PREFIX.sub("", text).rstrip()
        if line.startswith(_LINKS):
            is_linked = True
        elif line == _TRACEBACK:
            errors = errors if is_linked else []
            is_open, is_linked, is_announced = True, False, False
        elif line == _ORIGINAL:
            is_open = True
        elif is_open and line and not line[0].isspace():
            is_uncaught = _RANK_PREFIX.match(text) is not None
            errors.append(_Raised(_NCCL_ERROR.sub(r"\1: \2", line), is_uncaught))
            is_open, is_announced = False, line.endswith(":")
        elif is_announced and line:
            errors[-1] = errors[-1]._replace(text=f"{errors[-1].text} {line.strip()}")
            is_announced = False
        elif before == _NCCL_DETAIL and errors:
            text = f"{errors[-1].text.partition(' (run with')[0]}: {line}"
            errors[-1] = errors[-1]._replace(text=text)
        before = line
    return errors


def _thrown_errors(log_tail: str) -> list[str]:
    """Return the C++ exceptions that ended the process, and the watchdog's reports of them."""
    errors: list[str] = []
    is_open = False
    for line in log_tail.splitlines():
        if terminated := _TERMINATED.match(line):
            is_open = terminated[1] is not None
            errors.append(terminated[1] or line)
        elif is_open and (what := _WHAT.match(line)):
            errors[-1] = _WATCHDOG.sub("", what[1], count=1) or errors[-1]
            is_open = False
        elif (logged := _LOGGED.match(line)) and (logged[1] == "F" or _ABORTS.search(logged[2])):
            errors.append(_WATCHDOG.sub("", logged[2], count=1))
    return errors


def _last_line(log_tail: str) -> str:
    lines = (line.strip() for line in reversed(log_tail.splitlines()))
    return next((line for line in lines if line and not line.startswith(_CPP_FRAME)), "")[
        :_MAX_QUOTE_LENGTH
    ]
