"""Commands to agents: rows that are committed before any agent can see them.

The stream of each agent (`api/routes/agents.py`) sends commands without a result; agents carry out
each id once. So a command is committed, then carried out, then confirmed, even if a process dies in
between.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from paceline_server.decide.types import Decision
from paceline_server.store import launches
from paceline_server.store.commands import issue, withdraw


def act(session: Session, job_id: str, decision: Decision, over: bool, now_ns: int) -> None:
    """Issue the decided commands.

    Withdraw those that a new generation or the end of the job made obsolete.
    """
    if decision.generation is not None:
        withdraw(session, job_id, decision.generation, now_ns)
    for issued in decision.commands:
        issue(session, job_id, issued, now_ns)
    for request in decision.launch_requests:
        launches.request(session, job_id, request, now_ns)
    if over:
        session.flush()
        withdraw(session, job_id, None, now_ns)
