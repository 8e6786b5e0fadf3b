"""Checkpoints that a script saves by itself: when the next one comes, and whether it resumes."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from paceline_server.decide.types import Experience, JobView
from paceline_server.decide.wording import steps_text, time_text
from paceline_server.policy import Policy, does_resume

# From the decision to stop until the ranks are dead: the state pages are read every 0.5 s, those
# of very large jobs every 2.5 s.
STOP_SECONDS = 3.0


class ExpectedCheckpoint(NamedTuple):
    """The next checkpoint of a script that saves without being asked."""

    interval_steps: int
    steps: int  # until then; at least 1
    seconds: float  # until then

    def text(self) -> str:
        """Return the continuation of "the script's own next checkpoint"."""
        return (
            f"expected in {steps_text(self.steps)} ({time_text(self.seconds)}): "
            f"it saves every {steps_text(self.interval_steps)}"
        )


def expected_checkpoint(view: JobView) -> ExpectedCheckpoint | None:
    """Return the script's next checkpoint; None if it is not known to save, or saves too often.

    Too often: within the time that a stop takes, after one is complete.
    """
    interval, saved = view.experience.checkpoint_interval_steps, view.checkpoint_step
    newest = view.current_step
    if not interval or saved is None or newest is None or not view.step_seconds:
        return None
    saving = max(STOP_SECONDS, view.experience.checkpoint_saving_steps * view.step_seconds)
    if interval * view.step_seconds - saving <= STOP_SECONDS:
        return None
    steps = max(1, interval - (newest + 1 - saved))
    return ExpectedCheckpoint(interval, steps, steps * view.step_seconds)


def resumes(view: JobView, policy: Policy) -> bool:
    """Return whether the script is known to continue from its newest checkpoint when restarted."""
    return does_resume(policy, view.experience.resumes)


def after_restart(
    experience: Experience, first_step: int | None, known_step: int | None
) -> Experience:
    """Return the experience after a restart.

    Args:
        first_step: the first step of the new generation.
        known_step: steps completed in the newest checkpoint that was known before it.
    """
    if first_step is None or not known_step:
        return experience  # there was nothing to resume from
    return replace(experience, resumes=first_step >= known_step)
