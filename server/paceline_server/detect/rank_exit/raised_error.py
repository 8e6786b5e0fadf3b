"""The error that ended a rank, read from its last lines of output."""

from __future__ import annotations

import re

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
# torch.utils.data reports a worker that died; it may notice that by a broken connection.
LOADER_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # PyTorch writes it before each line of a traceback
_TRACEBACK = "Traceback (most recent call last):"
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_MAX_QUOTE_LENGTH = 200


def error_line(log_tail: str) -> str:
    """Return the line that names the error; without a traceback, the last line.

    If a traceback has several errors, the last one that is not the consequence of a peer's end.
    """
    errors = _raised_errors(log_tail) or _last_lines(log_tail)
    own = [error for error in errors if not _follows(error)]
    return (own or errors or [""])[-1][:_MAX_QUOTE_LENGTH]


def is_consequence(log_tail: str) -> bool:
    """Return whether the rank failed because its connection to a peer broke.

    The first error of a traceback decides, because errors raised while it was handled follow from
    it. Without a traceback, all lines are searched.
    """
    errors = _raised_errors(log_tail)
    if any(map(LOADER_WORKERS.search, errors)):
        return False
    return _follows(errors[0] if errors else log_tail)


def names_device_error(log_tail: str) -> bool:
    """Return whether CUDA or NCCL report an error of the rank's own device or node."""
    return _OWN.search(log_tail) is not None


def _follows(text: str) -> bool:
    return _CONSEQUENCE.search(text) is not None and _OWN.search(text) is None


def _raised_errors(log_tail: str) -> list[str]:
    """Return the errors of the last traceback in the order in which they were raised."""
    errors: list[str] = []
    is_open = is_linked = False
    before = ""
    for text in log_tail.splitlines():
        line = _RANK_PREFIX.sub("", text).rstrip()
        if line.startswith(_LINKS):
            is_linked = True
        elif line == _TRACEBACK:
            errors = errors if is_linked else []
            is_open, is_linked = True, False
        elif is_open and line and not line[0].isspace():
            errors.append(_NCCL_ERROR.sub(r"\1: \2", line))
            is_open = False
        elif before == _NCCL_DETAIL and errors:
            errors[-1] = f"{errors[-1].partition(' (run with')[0]}: {line}"
        before = line
    return errors


def _last_lines(log_tail: str) -> list[str]:
    return [line.strip() for line in log_tail.splitlines() if line.strip()][-1:]
