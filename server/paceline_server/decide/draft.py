"""A decision in the making: the job's state after it, and the changes so far."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paceline_server.decide.types import (
    ActionView,
    AuditEntry,
    Decision,
    Experience,
    IncidentView,
    IssuedCommand,
    JobState,
    JobView,
    LaunchRequest,
    RankView,
    Restarted,
)
from paceline_server.policy import Policy
from paceline_wire.commands import Command
from paceline_wire.topology import Topology

ENDED: frozenset[JobState] = frozenset({"finished", "failed", "stopped"})
NANOSECONDS = 1_000_000_000


class Draft:
    """Every stage of `decide` reads the current state here and writes its changes here."""

    def __init__(
        self,
        view: JobView,
        policy: Policy,
        now_ns: int,
        next_command_id: Callable[[], int],
        new_id: Callable[[str], str],
        maintenance: str | None = None,
    ) -> None:
        """`maintenance`: the window in which mode `auto` has become `approve`, if there is one."""
        self.view = view
        self.policy = policy
        self.maintenance = maintenance
        self.now_ns = now_ns
        self.new_id = new_id
        self.state: JobState = view.state
        self.generation = view.generation
        self.topology: Topology = view.topology
        self.ranks: list[RankView] = view.ranks
        self.escalated: set[str] = (
            set()
        )  # ids of incidents that became more severe or were explained in this tick
        self.quarantine: dict[str, str] = {}
        self.restarted: Restarted | None = None
        self.experience: Experience = view.experience
        self._next_command_id = next_command_id
        self._incidents = {incident.incident_id: incident for incident in view.incidents}
        self._actions = {action.action_id: action for action in view.actions}
        self._commands: list[IssuedCommand] = []
        self._launch_requests: list[LaunchRequest] = []
        self._withdrawn_launches: list[str] = []
        self._audit: list[AuditEntry] = []

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def newest_steps(self) -> list[int]:
        """The newest step of each rank that has finished one in this generation."""
        return [rank.step for rank in self.ranks if rank.step is not None]

    def incidents(self) -> list[IncidentView]:
        """Return the unresolved incidents, oldest first."""
        return [incident for incident in self._incidents.values() if incident.state != "resolved"]

    def actions(self, *states: str) -> list[ActionView]:
        return [action for action in self._actions.values() if action.state in states]

    def incident(self, incident_id: str) -> IncidentView:
        return self._incidents[incident_id]

    def action(self, action_id: str) -> ActionView | None:
        return self._actions.get(action_id)

    def put_incident(self, incident: IncidentView) -> IncidentView:
        self._incidents[incident.incident_id] = incident
        return incident

    def put_action(self, action: ActionView) -> ActionView:
        self._actions[action.action_id] = action
        return action

    def end_action(
        self, action: ActionView, state: str, *, error: str | None = None, verb: str | None = None
    ) -> ActionView:
        """Set the action's final `state`: done, failed, rejected or superseded."""
        ended = msgspec.structs.replace(
            action, state=state, finished_ns=self.now_ns, error=error or action.error
        )
        self.audit("policy", verb or state, action.action_id, error or action.reason)
        return self.put_action(ended)

    def is_due(self, due_ns: int, longest_ns: int) -> bool:
        """Return whether a moment has come. A wait for it that is longer than `longest_ns` means
        that the clock was set back."""
        return not 0 < due_ns - self.now_ns <= longest_ns

    def issue(self, agent_id: str, action_id: str, command: Callable[[int], Command]) -> int:
        """Send `command(command_id)` to the agent; return the id."""
        command_id = self._next_command_id()
        self._commands.append(
            IssuedCommand(agent_id=agent_id, action_id=action_id, command=command(command_id))
        )
        return command_id

    def request_launch(self, request: LaunchRequest) -> None:
        """Ask the launcher that owns the job, once the request is committed."""
        self._launch_requests.append(request)

    def withdraw_launch(self, action_id: str) -> None:
        """Withdraw the request for a restart: the commit fails if it has begun meanwhile."""
        self._withdrawn_launches.append(action_id)

    def audit(self, actor: str, verb: str, subject: str, detail: str = "") -> None:
        self._audit.append(AuditEntry(actor=actor, verb=verb, subject=subject, detail=detail))

    def change_state(self, state: JobState, why: str) -> None:
        if state != self.state:
            self.audit("policy", f"job is {state}", self.view.job_id, why)
            self.state = state

    def _with_version(self, action: ActionView, before: ActionView | None) -> ActionView:
        """Return the action with the version of the policy that decided its state."""
        if before is not None and before.state == action.state:
            return action
        return msgspec.structs.replace(action, policy_version=self.view.policy_version)

    def decision(self) -> Decision:
        """Return what differs from the view."""
        view = self.view
        incidents = {incident.incident_id: incident for incident in view.incidents}
        actions = {action.action_id: action for action in view.actions}
        return Decision(
            state=self.state if self.state != view.state else None,
            generation=self.generation if self.generation != view.generation else None,
            topology=self.topology if self.topology != view.topology else None,
            ranks=self.ranks if self.ranks is not view.ranks else None,
            incidents=[new for id_, new in self._incidents.items() if incidents.get(id_) != new],
            actions=[
                self._with_version(new, actions.get(id_))
                for id_, new in self._actions.items()
                if actions.get(id_) != new
            ],
            commands=self._commands,
            launch_requests=self._launch_requests,
            withdrawn_launches=self._withdrawn_launches,
            quarantine=self.quarantine,
            restarted=self.restarted,
            experience=self.experience if self.experience != view.experience else None,
            audit=self._audit,
        )
