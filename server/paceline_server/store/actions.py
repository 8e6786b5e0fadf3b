"""Actions as rows."""

from __future__ import annotations

from typing import Any

from paceline_server.decide.types import ActionView


def action_columns(job_id: str, view: ActionView) -> dict[str, Any]:
    """Return the columns of the `ActionRow` of an action, without `version`."""
    restarts = view.kind == "restart" and view.state in ("running", "done")
    return {
        "id": view.action_id,
        "job_id": job_id,
        "incident_id": view.incident_id,
        "kind": view.kind,
        "state": view.state,
        "restart_of": view.generation if restarts else None,
        "created_ns": view.created_ns,
        "noticed": True,
        "view": view,
    }
