"""The error that ended a rank, read from its last lines of output.

Python reports it in a traceback. C++ reports an exception that nothing caught as `terminate called
after throwing an instance of 'TYPE'` and, in the next line, `what():  TEXT`, and aborts the
process: so end a thread of NCCL or gloo that lost its peer, timed out or found an error of the GPU.
`faulthandler` reports the Python line at which a signal such as SIGSEGV ended the process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from paceline_wire.ending import fatal_stack
from paceline_wire.stacks import is_caller, is_installed

_CONSEQUENCE = re.compile(
    r"nccl.*(remote|system) error|gloo.*(enforce|transport)|\[gloo|processgroup|not? heartbeat"
    r"|monitoredbarrier|dist(backend|network|store)error|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
# Any library reports these as well: one that downloads something, in an error of its own type.
_CONNECTION = re.compile(
    r"connection (reset|closed|refused|was closed)|broken pipe|closed by (peer|remote)"
    r"|remote (peer|process) (exited|closed)|socket ?error|timed? ?out",
    re.IGNORECASE,
)
# Errors of torch. A script that exits with the text of one raises SystemExit.
_TORCH_TYPE = re.compile(r"(RuntimeError|SystemExit|torch\.[\w.]+)(:|$)")
# Reports of CUDA and NCCL about the rank's own device or node, in whichever error they are found,
# and of torch about its own loader or the arguments of a collective.
_OWN = re.compile(
    r"cuda (error|failure)(?!: driver shutting down)|shared memory segment|no space left on device"
    r"|dataloader timed out|processgroupgloo::\w+: ",
    re.IGNORECASE,
)
# The line after "Last error:" says what it was. Without `.*` in front: a script can write any line.
_NCCL_ERROR = re.compile(r"(NCCL error) in: \S+, (.*), NCCL version.*")
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
_NOT_CONNECTED = re.compile(
    r"connectFullMesh failed|timed out connecting|trying to connect|connect to \S+ failed"
    r"|(failed|unable) to connect|(could not|cannot) connect|socketStartConnect",
    re.IGNORECASE,
)
_DEVICE_ASSERTION = re.compile(r": block: \[[\d,]+\], thread: \[[\d,]+\] (Assertion .*)")
_ASSERTED = "device-side assert triggered"
_CPP_FRAME = "frame #"
# The lines of a frame in a traceback: its place, its source if it raises, and the marks below it.
_FRAME = re.compile(r'  File "(.+)", line (\d+)(?:, in (.+))?')
_FATAL_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_TORCH_FILE = "/torch/"
_RAISE = re.compile(r"    raise\b")
_MARKED = re.compile(r" +[~^]+")
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_MAX_QUOTE_LENGTH = 200


def error_line(log_tail: str) -> str:
    """Return the line that names the error; without an error, the last line.

    If a traceback has several errors, the last one that is not the consequence of a peer's end.
    """
    raised = _first_cause(_raised_errors(log_tail), log_tail)
    return raised or fatal_stack(log_tail).partition("\n")[0] or _last_line(log_tail)


def error_place(log_tail: str) -> str | None:
    """Return where the error of `error_line` was raised, "FILE:LINE FUNCTION", or None.

    It is the innermost place in the script's own files, if there is one.
    """
    raised = _raised_errors(log_tail)
    line = _first_cause(raised, log_tail)
    errors = (e for e in reversed(raised) if e.places and line.startswith(e.line))
    if (error := next(errors, None)) is None:
        return None
    return (_own(error.places) or error.places)[-1]


def fatal_place(log_tail: str) -> str | None:
    """Return where a signal ended the process, "FILE:LINE FUNCTION", or None.

    It is the innermost place in the script's own files, if there is one.
    """
    places = [f"{f[1]}:{f[2]} {f[3]}" for f in _FATAL_FRAME.finditer(fatal_stack(log_tail))]
    return next(iter(_own(places) or places), None)


def _own(places: list[str]) -> list[str]:
    """Return the places in the script's own files."""
    return [p for p in places if not is_installed(p) and not is_caller(p)]


def abort_line(log_tail: str, *, is_error: bool) -> str:
    """Return the error because of which a process aborted itself; empty if it names none.

    A traceback counts if nothing caught its error, or if that is about the device: a script also
    logs errors that it handles.

    Args:
        log_tail: the last lines of output.
        is_error: whether it is, instead, the error that the process reported when it ended.
    """
    raised = [error for error in _raised_errors(log_tail) if is_error or _ends_process(error)]
    return _first_cause(raised, log_tail)


def errors_in(log_tail: str) -> list[str]:
    """Return the errors of the last traceback, and the C++ exceptions that ended the process."""
    return [*(error.text for error in _raised_errors(log_tail)), *_thrown_errors(log_tail)]


def is_consequence(log_tail: str) -> bool:
    """Return whether the rank failed because its connection to a peer broke.

    The first error of a traceback decides, because errors raised while it was handled follow from
    it. Without a traceback, all lines are searched.
    """
    errors = _raised_errors(log_tail)
    if any(LOADER_WORKERS.search(error.text) for error in errors):
        return False
    return errors[0].follows if errors else _follows(log_tail)


def raised_by_itself(log_tail: str, *, is_error: bool) -> bool:
    """Return whether an error that nothing caught, and that no peer caused, ended the rank.

    The arguments are those of `abort_line`.
    """
    errors = _raised_errors(log_tail)
    return bool(errors) and (is_error or errors[0].is_uncaught) and not errors[0].follows


def names_device_error(log_tail: str) -> bool:
    """Return whether CUDA or NCCL report an error of the rank's own device or node."""
    return _OWN.search(log_tail) is not None


def aborted_by_itself(log_tail: str) -> bool:
    """Return whether nothing in the log shows that a process aborted itself because of its peers.

    gloo's error about a mismatch is an exception: other ranks caused it, but no connection broke.
    """
    has_followed = any(error.follows for error in _raised_errors(log_tail)) or any(
        map(_follows, _thrown_errors(log_tail))
    )
    return not has_followed or names_mismatch(log_tail)


def names_mismatch(log_tail: str) -> bool:
    """Return whether gloo aborted the rank because its peers entered another collective or size."""
    return any(map(_MISMATCH.search, _thrown_errors(log_tail)))


def names_missing_connection(error: str) -> bool:
    """Return whether the rank ended because it could not connect to a peer or to the store."""
    return _NOT_CONNECTED.search(error) is not None


def _follows(text: str, *, is_torch: bool = True) -> bool:
    """Return whether the text reports that a peer ended or is missing; torch may be its source."""
    is_consequence = _CONSEQUENCE.search(text) or (is_torch and _CONNECTION.search(text))
    return bool(is_consequence) and _OWN.search(text) is None


class _Raised(NamedTuple):
    """An error of a traceback. torch starts each line of one that nothing caught with `[rank0]:`"""

    text: str
    is_uncaught: bool
    is_scripts: bool  # a `raise` of Python code outside torch
    places: list[str]  # frames of the traceback, outermost first

    @property
    def line(self) -> str:
        """The text as it is quoted."""
        return self.text[:_MAX_QUOTE_LENGTH]

    @property
    def follows(self) -> bool:
        is_torch = not self.is_scripts and _TORCH_TYPE.match(self.text) is not None
        return _follows(self.text, is_torch=is_torch)


def _ends_process(error: _Raised) -> bool:
    return error.is_uncaught or names_device_error(error.text)


def _first_cause(raised: Sequence[_Raised], log_tail: str) -> str:
    """Return the error that the others follow from, with the assertion if one failed on the GPU.

    Args:
        raised: those errors of the traceback that count.
    """
    thrown = _thrown_errors(log_tail)
    own_raised = [error.text for error in raised if not error.follows]
    own_thrown = [error for error in thrown if not _follows(error)]
    others = [error.text for error in raised]
    error = next(chain(reversed(own_raised), own_thrown, reversed(others), thrown), "")
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
    places: list[str] = []
    for text in log_tail.splitlines():
        line = _RANK_PREFIX.sub("", text).rstrip()
        if line.startswith(_LINKS):
            is_linked = True
        elif line == _TRACEBACK:
            errors = errors if is_linked else []
            is_open, is_linked, is_announced, places = True, False, False, []
        elif line == _ORIGINAL:
            is_open, places = True, []
        elif is_open and line and not line[0].isspace():
            is_uncaught = _RANK_PREFIX.match(text) is not None
            innermost = places[-1] if places else ""
            is_scripts = _RAISE.match(before) is not None and _TORCH_FILE not in innermost
            error = _NCCL_ERROR.sub(r"\1: \2", line)
            errors.append(_Raised(error, is_uncaught, is_scripts, places))
            is_open, is_announced = False, line.endswith(":")
        elif is_announced and line:
            errors[-1] = errors[-1]._replace(text=f"{errors[-1].text} {line.strip()}")
            is_announced = False
        elif before == _NCCL_DETAIL and errors:
            text = f"{errors[-1].text.partition(' (run with')[0]}: {line}"
            errors[-1] = errors[-1]._replace(text=text)
        if frame := _FRAME.fullmatch(line):
            places.append(" ".join(filter(None, (f"{frame[1]}:{frame[2]}", frame[3]))))
        if not _MARKED.fullmatch(line):
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
    """Return the last line that is neither a rule nor a frame, without the margin of a group."""
    lines = (line.strip(" |") for line in reversed(log_tail.splitlines()))
    lines = (line for line in lines if any(map(str.isalnum, line)))
    return next((line for line in lines if not line.startswith(_CPP_FRAME)), "")[:_MAX_QUOTE_LENGTH]
