"""What a channel of people hears: a few sentences, where machines get the whole notice."""

from __future__ import annotations

import re

from paceline_server.act.announce import ActionNotice, IncidentAlert, Notice

_TOLD = ("proposed", "done", "failed")
_NOT_WORTH_TELLING = ("start", "notify")  # once they are done
# One chat or another takes these for links, for markup and for calls to everybody, and they have no
# common way to quote them: their likes do instead.
_TAME = str.maketrans(
    "<>[]`*~@", "()()'\N{ASTERISK OPERATOR}\N{TILDE OPERATOR}\N{FULLWIDTH COMMERCIAL AT}"
)
_EMPHASIS = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # as in __init__, and not as in all_reduce


def text_of(notice: Notice) -> str:
    """Empty if it is nothing to them."""
    lines = _action(notice) if isinstance(notice, ActionNotice) else _incident(notice)
    text = "\n".join(" ".join(line.split()) for line in lines if line)
    return _EMPHASIS.sub("\N{MODIFIER LETTER LOW MACRON}", text.translate(_TAME))


def _incident(notice: IncidentAlert) -> list[str]:
    """Nothing while it is being repaired: that is told of the action."""
    incident, finding = notice.incident, notice.incident.finding
    if notice.event == "updated" and incident.state == "mitigating":
        return []
    word = "RESOLVED" if notice.event == "resolved" else finding.severity.upper()
    lines = [f"{word} {_job(notice)}: {finding.summary}"]
    if notice.event != "resolved":
        lines += [f"Cause: {finding.cause}.", finding.advice or ""]
        lines += [f"paceline incidents show {incident.incident_id}"]
    return lines


def _action(notice: ActionNotice) -> list[str]:
    action = notice.action
    if action.state not in _TOLD or (action.state == "done" and action.kind in _NOT_WORTH_TELLING):
        return []
    lines = [f"{action.state.upper()} {_job(notice)}: {action.kind}. {action.reason}"]
    if action.resumed_step is not None:
        lost = "" if action.lost_steps is None else f", {action.lost_steps} steps lost"
        lines.append(f"Goes on at step {action.resumed_step}{lost}.")
    if action.error:
        lines.append(action.error)
    if action.state == "proposed":
        lines.append(f"paceline actions approve {action.action_id}")
    return lines


def _job(notice: Notice) -> str:
    name, own = notice.job_name, notice.job_id
    return own if name == own else f"{name} ({own})"
