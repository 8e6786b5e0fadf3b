"""The worth of a planned restart: its expected gain against its cost, in seconds of the job.

The gain is the time that the slowdown would cost if nothing were done:

    gain = slow * (1 - speed now / speed after) + (rest - slow) * (1 - 1 / speed after)

with `slow`, the time for which the slowdown is expected to last within the `rest` of the training
after the restart, and speeds relative to the healthy job of full size. `speed after` is 1 if a
spare node takes over, and less if the job shrinks: then it also loses in the time in which the
slowdown would have been over.

*How long does it last?* If its cause is known and only a fix ends it (a hot GPU, a degraded link):
for the whole rest. If its cause is load on the host, or unknown, the rate at which it ends is not
known either. With a Gamma prior of one ending in 60 s, the rate after `age` without an ending is
Gamma(1, 60 s + age), and the probability that it lasts for another t is

    P(t) = b / (b + t),  b = 60 s + age

(the distribution of Lomax; for a long age Lindy's law: what has lasted for an hour lasts for
another one with a probability of one half). The integral from begin to end is
`slow = b ln((b + end) / (b + begin))`. So a slowdown of a few seconds is expected to last for
minutes, one of hours for much of the training. The 60 s express that load on a host mostly ends
within minutes.

*How long is the rest?* As the script reports (`total_steps` in the metadata of the job). Otherwise
by the same law: as long as it has trained so far, plus one hour, the prior of a job that is worth
repairing.

    cost = pause + repeated steps + P(the start fails) * (start timeout / 2 + pause)

*Pause:* the last one of this job, from the stop of its ranks to a step of all; at first the time
of its start. *Failure:* (failed + 1) / (starts + 20), which is Beta(1, 19): one in 20, until this
job has shown its own rate. A start that fails is noticed at once or at the latest after the start
timeout, and another pause follows.
"""

from __future__ import annotations

import math

from paceline_server.decide.checkpoints import expected_checkpoint
from paceline_server.decide.price import price_of
from paceline_server.decide.progress import ActionProgress
from paceline_server.decide.types import JobView, Worth
from paceline_server.decide.wording import steps_text, time_text
from paceline_server.detect.causes.catalog import can_end_without_fix
from paceline_server.detect.finding import Finding
from paceline_server.policy import Policy
from paceline_wire.metadata import TOTAL_STEPS

PRIOR_SLOW_SECONDS = 60.0
PRIOR_TRAINING_SECONDS = 3600.0
PRIOR_STARTS = 20
DEFAULT_PAUSE_SECONDS = 60.0  # before any start of the job was measured


def worth_of(
    view: JobView, policy: Policy, finding: Finding, progress: ActionProgress
) -> Worth | None:
    """Return what a restart for this slowdown gains and costs; None if a figure is not known.

    Args:
        view: the job.
        policy: of the job.
        finding: the slowdown.
        progress: the planned restart.
    """
    share, newest, step_seconds = slow_share(finding), view.current_step, view.step_seconds
    if share is None or newest is None or not step_seconds:
        return None
    total = _total_steps(view)
    remaining_seconds = (
        (view.highest_step or 0) * step_seconds + PRIOR_TRAINING_SECONDS
        if total is None
        else max(0, total - newest - 1) * step_seconds
    )
    begin = finding.onset_step if finding.onset_step is not None else finding.step
    age = 0.0 if begin is None else max(0, newest - begin) * step_seconds
    expected = expected_checkpoint(view) if progress.waits else None
    wait = min(0.0 if expected is None else expected.seconds, remaining_seconds)
    rest = remaining_seconds - wait
    can_end = can_end_without_fix(finding.cause) or finding.cause == "unknown"
    slow = expected_slow_seconds(age, wait, remaining_seconds) if can_end else rest
    kept = progress.kept_ratio
    gain = slow * (1.0 - (1.0 - share) / kept) + (rest - slow) * (1.0 - 1.0 / kept)

    shown = view.experience
    pause = DEFAULT_PAUSE_SECONDS if shown.pause_seconds is None else shown.pause_seconds
    price = price_of(view, progress)
    repeated = price.seconds or 0.0
    risk = failure_probability(shown.starts, shown.failed_starts)
    cost = pause + repeated + risk * (policy.start_timeout_seconds / 2 + pause)
    return Worth(
        gain_seconds=gain,
        cost_seconds=cost,
        slow_ratio=share,
        slow_seconds=slow,
        lasted_seconds=age,
        remaining_seconds=remaining_seconds,
        is_remaining_known=total is not None,
        kept_ratio=kept,
        wait_seconds=wait,
        pause_seconds=pause,
        is_pause_measured=shown.pause_seconds is not None,
        repeated_steps=price.steps,
        repeated_seconds=repeated,
        failure_probability=risk,
    )


def slow_share(finding: Finding) -> float | None:
    """Return the share of the step time that the slowdown costs."""
    if finding.cost_ratio is not None:
        share = finding.cost_ratio
    elif finding.slowdown:
        share = 1.0 - 1.0 / finding.slowdown
    else:
        return None
    return min(max(share, 0.0), 1.0) if math.isfinite(share) else None


def expected_slow_seconds(age: float, begin: float, end: float) -> float:
    """Return how long a slowdown that has lasted for `age` is expected to last from begin to end.

    Args:
        age: seconds since it began.
        begin: seconds from now on.
        end: seconds from now on.
    """
    b = PRIOR_SLOW_SECONDS + age
    return b * math.log((b + max(begin, end)) / (b + begin))


def failure_probability(starts: int, failed: int) -> float:
    """Return the probability that the next start of the job fails."""
    return (failed + 1) / (starts + PRIOR_STARTS)


def worth_text(worth: Worth) -> str:
    """Return two sentences: the expected gain and the expected cost, with their reasons."""
    rest = time_text(worth.remaining_seconds)
    of = (
        f"the remaining {rest}"
        if worth.is_remaining_known
        else f"the remaining time, assumed to be {rest} (as long as so far, plus an hour)"
    )
    gain = (
        f"Expected gain: {time_text(max(worth.gain_seconds, 0.0))} ({worth.slow_ratio:.0%} of the "
        f"step time, which is expected to last for {time_text(worth.slow_seconds)} of {of})."
    )
    repeated = "no step" if not worth.repeated_steps else steps_text(worth.repeated_steps)
    measured = "" if worth.is_pause_measured else ", not yet measured"
    cost = (
        f"Expected cost: {time_text(worth.cost_seconds)} (a pause of "
        f"{time_text(worth.pause_seconds)}{measured}, {repeated} repeated, a risk of "
        f"{worth.failure_probability:.0%} that the start fails)."
    )
    return f"{gain} {cost}"


def _total_steps(view: JobView) -> int | None:
    text = view.spec.metadata.get(TOTAL_STEPS, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) else None
