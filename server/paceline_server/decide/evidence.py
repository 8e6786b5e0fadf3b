"""Request Python stacks and Flight Recorder dumps of a hung job before it is killed.

A restart waits for them for a short time only: a hung job wastes all its GPUs.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.types import IncidentView
from paceline_wire.commands import Command, TakeDumps, TakeStacks

# Reading stacks takes 0.1 s on an idle machine, and the command and its result take as long again.
GRACE_SECONDS = 1.0
# Longer than agents wait for a rank to write its dump. A rank that cannot write reports it at once.
DUMP_GRACE_SECONDS = 5.0
MAXIMUM_RANKS = 8  # ranks whose stacks are read, per incident


def request_stacks(draft: Draft) -> None:
    """Request the stacks that findings ask for, once for each rank."""
    agents = {rank.rank: rank.agent_id for rank in draft.ranks if rank.state != "exited"}
    for incident in draft.incidents():
        if incident.finding.generation != draft.generation:
            continue
        room = MAXIMUM_RANKS - len(incident.stacks_asked)
        wanted = [
            rank
            for rank in dict.fromkeys(incident.finding.stacks_wanted)
            if rank in agents and rank not in incident.stacks_asked
        ][:room]
        if wanted:
            _request(draft, incident, wanted, agents)


def _request(
    draft: Draft, incident: IncidentView, wanted: list[int], agents: dict[int, str]
) -> None:
    by_agent: dict[str, list[int]] = defaultdict(list)
    for rank in wanted:
        by_agent[agents[rank]].append(rank)
    for agent, ranks in sorted(by_agent.items()):
        draft.issue(agent, incident.incident_id, _ReadCommand(draft, ranks))
    requested = [*incident.stacks_asked, *wanted]
    draft.put_incident(replace(incident, stacks_asked=requested, stacks_asked_ns=draft.now_ns))


def request_dumps(draft: Draft) -> None:
    """Request the dumps of all ranks, once for each incident: they are compared with each other."""
    incidents = [
        incident
        for incident in draft.incidents()
        if incident.dumps_asked_ns is None
        and incident.finding.dumps_wanted
        and incident.finding.generation == draft.generation
    ]
    if not incidents:
        return
    by_agent: dict[str, list[int]] = defaultdict(list)
    for rank in draft.ranks:
        if rank.state != "exited":
            by_agent[rank.agent_id].append(rank.rank)
    for incident in incidents:
        for agent, ranks in sorted(by_agent.items()):
            draft.issue(agent, incident.incident_id, _ReadCommand(draft, ranks, TakeDumps))
        draft.put_incident(replace(incident, dumps_asked_ns=draft.now_ns))


class _ReadCommand:
    """Build the command that reads stacks or dumps of `ranks` on one node."""

    def __init__(
        self, draft: Draft, ranks: list[int], kind: type[TakeStacks | TakeDumps] = TakeStacks
    ) -> None:
        self._draft = draft
        self._ranks = ranks
        self._kind = kind

    def __call__(self, command_id: int) -> Command:
        return self._kind(
            command_id=command_id,
            job=self._draft.view.job_id,
            generation=self._draft.generation,
            ranks=self._ranks,
        )


def awaits_evidence(draft: Draft, incident: IncidentView) -> bool:
    """Return whether killing the ranks now would destroy evidence that is being read.

    False for an incident that has had an action: its next action is not delayed.
    """
    if incident.action_ids:
        return False
    return _awaits_stacks(draft, incident) or _awaits_dumps(draft, incident)


def _awaits_dumps(draft: Draft, incident: IncidentView) -> bool:
    asked_ns = incident.dumps_asked_ns
    if asked_ns is None or incident.finding.dumps_reported:
        return False
    return abs(draft.now_ns - asked_ns) < DUMP_GRACE_SECONDS * NANOSECONDS


def _awaits_stacks(draft: Draft, incident: IncidentView) -> bool:
    asked_ns = incident.stacks_asked_ns
    if asked_ns is None:
        return False
    if abs(draft.now_ns - asked_ns) >= GRACE_SECONDS * NANOSECONDS:
        return False
    findings = (incident.finding, *incident.symptoms)
    read = {stacks.rank for finding in findings for stacks in finding.stacks}
    alive = {rank.rank for rank in draft.ranks if rank.state != "exited"}
    return bool(alive & set(incident.stacks_asked) - read)
