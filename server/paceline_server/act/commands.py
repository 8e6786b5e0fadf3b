"""Commands to agents: rows that are committed before any agent can see them.

The stream of each agent (`api/routes/agents.py`) hands out what has no result yet; agents carry
out each id once. So an action is intended, then carried out, then observed, whatever dies between.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from paceline_server.decide.types import Decision
from paceline_server.store.commands import issue, withdraw


def act(session: Session, job_id: str, decision: Decision, over: bool, now_ns: int) -> None:
    """Issue what was decided, and take back what a newer generation or the end made void."""
    if decision.generation is not None:
        withdraw(session, job_id, decision.generation, now_ns)
    for issued in decision.commands:
        issue(session, job_id, issued, now_ns)
    if over:
        session.flush()
        withdraw(session, job_id, None, now_ns)
