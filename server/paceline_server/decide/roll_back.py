"""Going back to a checkpoint before the loss went wrong. Pure.

A restart alone may load a checkpoint that contains the damage. `paceline.Checkpoints` follows the
environment that `roll_back_environment` returns: it sets later checkpoints aside, once per action,
and leaves data out. Both stay in the environment of later generations, where they have no effect,
so that a crash right after the return does not undo it.
"""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.decide.draft import Draft
from paceline_server.decide.progress import ActionProgress
from paceline_server.decide.types import Experience, JobView, RolledBack
from paceline_server.detect.causes.catalog import NON_FINITE_LOSS
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import LOSS
from paceline_wire.metadata import ROLL_BACK

# Onsets within so many steps are one place in the training. PaLM left out 200 to 500 batches.
_SAME_STEPS = 500
_KEPT = 16


def is_about_loss(finding: Finding) -> bool:
    """Return whether the finding is a loss that makes later steps useless."""
    return finding.kind == LOSS.name or finding.cause == NON_FINITE_LOSS


def can_roll_back(view: JobView) -> bool:
    """Return whether the script follows the environment: it uses `paceline.Checkpoints`.

    A launcher starts its ranks by itself, with the environment of the job.
    """
    return view.spec.metadata.get(ROLL_BACK) == "yes" and view.launch is None


def tries(view: JobView, finding: Finding) -> list[RolledBack]:
    """Return how the job went back for this place in the training before."""
    onset = finding.onset_step
    if onset is None:
        return []
    before = view.experience.rolled_back
    return [one for one in before if abs(onset - one.onset_step) <= _SAME_STEPS]


def tries_text(before: list[RolledBack]) -> str:
    """Return a sentence on earlier tries, the evidence for giving up."""
    parts = (
        f"before step {one.onset_step} ({one.action_id}"
        + (f", without the data of {one.skip_steps} steps)" if one.skip_steps else ")")
        for one in before
    )
    return f"The job went back {', then '.join(parts)}, and the loss went wrong again."


def remember(draft: Draft, action_id: str, progress: ActionProgress) -> Experience:
    """Return the experience with the return that this action begins, if it is one."""
    shown, onset = draft.experience, progress.roll_back_onset
    if onset is None or any(one.action_id == action_id for one in shown.rolled_back):
        return shown
    new = RolledBack(
        action_id=action_id,
        onset_step=onset,
        step=max(0, onset - 1),
        skip_steps=draft.policy.loss_skip_steps,
    )
    return replace(shown, rolled_back=[*shown.rolled_back, new][-_KEPT:])


def roll_back_environment(shown: Experience) -> dict[str, str]:
    """Return the variables that make the script go back; none if it never had to."""
    if not shown.rolled_back:
        return {}
    newest = shown.rolled_back[-1]
    found = {"PACELINE_ROLL_BACK": f"{newest.step}:{newest.action_id}"}
    if newest.skip_steps:
        found["PACELINE_SKIP_STEPS"] = f"{newest.step}:{newest.step + newest.skip_steps}"
    return found
