"""Texts for chat channels: a few sentences; webhooks get the complete notice."""

from __future__ import annotations

import re

from paceline_server.act.announce import ActionNotice, IncidentAlert, Notice
from paceline_server.lag import OUTDATED_SECONDS

_REPORTED_STATES = ("proposed", "done", "failed")
_SILENT_WHEN_DONE = ("start", "notify")
# Chat services interpret these characters as links, markup or mentions, and have no common way to
# escape them. Look-alikes replace them.
_LOOK_ALIKES = str.maketrans(
    "<>[]`*~@", "()()'\N{ASTERISK OPERATOR}\N{TILDE OPERATOR}\N{FULLWIDTH COMMERCIAL AT}"
)
_EMPHASIS = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # matches in __init__, but not in all_reduce


def chat_text(notice: Notice) -> str:
    """Return the text of a notice; empty if it needs no message."""
    lines = _action(notice) if isinstance(notice, ActionNotice) else _incident(notice)
    if lines and notice.lag_seconds is not None and notice.lag_seconds > OUTDATED_SECONDS:
        lines.append(f"The analysis was {notice.lag_seconds:.0f} s behind: this may have changed.")
    text = "\n".join(" ".join(line.split()) for line in lines if line)
    return _EMPHASIS.sub("\N{MODIFIER LETTER LOW MACRON}", text.translate(_LOOK_ALIKES))


def _incident(notice: IncidentAlert) -> list[str]:
    """Return no lines for an update unless the incident got worse or names another culprit.

    While it is being repaired, the action's notices report that.
    """
    incident, finding = notice.incident, notice.incident.finding
    is_news = notice.previous_severity is not None or notice.is_correction
    if notice.event == "updated" and (incident.state == "mitigating" or not is_news):
        return []
    label = "RESOLVED" if notice.event == "resolved" else finding.severity.upper()
    lines = [f"{label} {_job(notice)}: {finding.summary}"]
    if notice.event != "resolved":
        lines += [f"Cause: {finding.cause}.", finding.advice or ""]
        lines += [f"Details: paceline incidents show {incident.incident_id}"]
    return lines


def _action(notice: ActionNotice) -> list[str]:
    action = notice.action
    if action.state not in _REPORTED_STATES:
        return []
    if action.state == "done" and action.kind in _SILENT_WHEN_DONE:
        return []
    lines = [f"{action.state.upper()} {_job(notice)}: {action.kind}. {action.reason}"]
    if action.resumed_step is not None:
        lost = (
            ""
            if action.lost_steps is None
            else f"; {action.lost_steps} {_steps(action.lost_steps)} lost"
        )
        lines.append(f"Resumed at step {action.resumed_step}{lost}.")
    if action.error:
        lines.append(action.error)
    if action.state == "proposed":
        lines.append(f"To approve: paceline actions approve {action.action_id}")
    return lines


def _steps(count: int) -> str:
    return "step" if count == 1 else "steps"


def _job(notice: Notice) -> str:
    name, job_id = notice.job_name, notice.job_id
    return job_id if name == job_id else f"{name} ({job_id})"
