"""Thresholds of the hang detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HangSettings:
    """Thresholds: how certain it must be that a rank is blocked. `Policy` defines for how long."""

    # Multiple of the usual (p99) duration of the operation, or of the step.
    step_multiple: float = 3.0
    # Multiple of the median step, and its most: an operation that stalls for as long as a step or
    # two (a page-out, another process) is no hang, and a restart of the job would cost more.
    least_steps: float = 2.0
    least_steps_seconds: float = 20.0
    # Most of the time that counts as waiting for a CPU: an operation may then take four times as
    # long, a transfer 16 times.
    most_waiting_share: float = 0.75
    # The agent itself must have read the same state page for this long (four reads), whatever times
    # the page contains.
    observed_seconds: float = 1.5
    # Half of the policy's limit: it is certain that a stopped process is blocked.
    confirmed_seconds: float = 1.5
    # How a process ended says more than that it is gone, and is reported within seconds.
    gone_seconds: float = 6.0
    # A page received longer ago does not show the current state: the delivery may hang, not the
    # training.
    freshness_seconds: float = 2.5
    # A rank that raised an error may take this long to end: threads, workers, connections, memory.
    ending_seconds: float = 30.0
    # Ranks of which some handle a signal to end may take this long: a person, a scheduler or a
    # launcher is about to end them all.
    signaled_seconds: float = 15.0
    # Multiple of the policy's `late_rank_seconds` if all ranks are in `init_process_group`: it may
    # connect thousands of them.
    joining_multiple: float = 2.0
    # A pause of all ranks, of which none waits for another, is reported for information after this.
    pause_seconds: float = 20.0
    # Multiple of the longest hang of the same ranks that ended by itself.
    pause_multiple: float = 2.0
    # Number of known steps from which their p99 is meaningful.
    known_steps: int = 3


DEFAULTS = HangSettings()
