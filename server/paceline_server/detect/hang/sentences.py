"""The summary of a hang: one sentence with the rank, its node and the cause."""

from __future__ import annotations

from paceline_server.detect.causes.catalog import (
    ENDED_EARLY,
    PROCESS_GONE,
    PROCESS_STOPPED,
    UNKNOWN,
)
from paceline_server.detect.hang.python_stacks import GIL_HELD
from paceline_server.detect.hang.rank_cause import DEVICE_WAIT, UNINTERRUPTIBLE_IO
from paceline_server.detect.hang.verdict import DEADLOCK, MISMATCH
from paceline_wire.stacks import StackFrame

RESUMED = "The job makes progress again."
ENDED_BY_ERROR = "An error of a rank that kept the job waiting has ended it."
PAUSE_ADVICE = (
    "if the script takes longer on purpose, raise hang_evaluation_seconds and hang_busy_seconds in "
    "the job's policy"
)
_CLAUSES = {
    PROCESS_STOPPED: "its process is stopped (SIGSTOP)",
    PROCESS_GONE: "its process is gone",
    UNINTERRUPTIBLE_IO: "its process is blocked in uninterruptible I/O",
    ENDED_EARLY: "it ended before the other ranks finished",
    DEADLOCK: "ranks wait for each other (deadlock)",
    UNKNOWN: "the cause is unknown",
    DEVICE_WAIT: "it waits for its GPU, which does not finish its work",
}


def hang_summary(
    subject: str,
    cause: str,
    frame: StackFrame | None,
    awaited: str | None,
    *,
    is_rank: bool,
    was_signaled: bool,
) -> str:
    """Return `Rank 0 (node-0) is hung and blocks the job: its process is stopped (SIGSTOP).`

    Args:
        subject: The rank with its node, or the job.
        cause: As in the finding.
        frame: Innermost frame of the culprit's own code, once its stack was read.
        awaited: What its stack shows that it waits for.
        is_rank: The subject is one rank.
        was_signaled: It reported a signal after which its script ends.
    """
    received = " received a signal to end," if was_signaled else ""
    states = [] if is_rank and cause in (ENDED_EARLY, PROCESS_GONE) else ["is hung"]
    states += ["blocks the job"] if is_rank else []
    waits = "" if awaited is None else f", waiting for {awaited}"
    clause = _clause(cause, frame, is_rank=is_rank)
    return f"{subject}{received} {' and '.join(states)}: {clause}{waits}."


def pause_summary(
    subject: str, cause: str, frame: StackFrame | None, limit_seconds: float, *, is_rank: bool
) -> str:
    """Return the summary of ranks that may run code in which nothing is recorded.

    `Rank 0 (node-0) keeps the job waiting (between operations, train.py:7 score), as in an
    evaluation. After 60 s it counts as hung.`

    Args:
        subject: The rank with its node, or the job.
        cause: As in the finding.
        frame: Innermost frame of the script's own code, once its stack was read.
        limit_seconds: From the last operation until the ranks count as hung.
        is_rank: The subject is one rank.
    """
    what = "keeps the job waiting" if is_rank else "pauses on all ranks"
    limit = f"After {limit_seconds:.0f} s it counts as hung."
    if cause.startswith(GIL_HELD):
        return f"{subject} {what}: {_clause(cause, frame, is_rank=is_rank)}. {limit}"
    details = [cause.partition(": ")[2] or cause.removeprefix("stuck in ")]
    details += [] if frame is None else [str(frame)]
    return f"{subject} {what} ({', '.join(details)}), as in an evaluation. {limit}"


def _clause(cause: str, frame: StackFrame | None, *, is_rank: bool) -> str:
    details = [] if frame is None else [str(frame)]
    clause = _CLAUSES.get(cause, cause)
    kind, _, detail = cause.partition(": ")
    if cause == DEVICE_WAIT and not is_rank:
        clause = "ranks wait for their GPUs, which do not finish their work"
    if cause.startswith(GIL_HELD):
        clause = f"its thread {cause.removeprefix(GIL_HELD)} holds the GIL"
    elif kind == MISMATCH:
        clause = f"{kind}, {detail}"
    elif kind.startswith("stuck "):
        clause = f"it is {kind}" if is_rank else kind
        details = [detail, *details] if detail else details
    if details and clause.endswith(")"):
        return f"{clause[:-1]}, {', '.join(details)})"
    return f"{clause} ({', '.join(details)})" if details else clause
