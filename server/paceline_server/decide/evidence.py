"""Python stacks and Flight Recorder dumps of a job that hangs, asked for before it is killed.

A restart waits for them, but only so long: a hung job costs all its GPUs each second.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.types import IncidentView
from paceline_wire.commands import Command, TakeDumps, TakeStacks

# A reading takes 0.1 s of an idle machine, and commands and answers as long again.
GRACE_SECONDS = 1.0
# Longer than agents wait for a rank that was told to write one. Ranks that cannot say so at once.
DUMP_GRACE_SECONDS = 5.0
MAXIMUM_RANKS = 8  # per incident


def ask_for_stacks(draft: Draft) -> None:
    """Once for each rank that a finding wants to know more of."""
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
            _ask(draft, incident, wanted, agents)


def _ask(draft: Draft, incident: IncidentView, wanted: list[int], agents: dict[int, str]) -> None:
    by_agent: dict[str, list[int]] = defaultdict(list)
    for rank in wanted:
        by_agent[agents[rank]].append(rank)
    for agent, ranks in sorted(by_agent.items()):
        draft.issue(agent, incident.incident_id, _Reading(draft, ranks))
    asked = [*incident.stacks_asked, *wanted]
    draft.put_incident(replace(incident, stacks_asked=asked, stacks_asked_ns=draft.now_ns))


def ask_for_dumps(draft: Draft) -> None:
    """Once for each incident: what one rank launched tells only beside what the others did."""
    asking = [
        incident
        for incident in draft.incidents()
        if incident.dumps_asked_ns is None
        and incident.finding.dumps_wanted
        and incident.finding.generation == draft.generation
    ]
    if not asking:
        return
    by_agent: dict[str, list[int]] = defaultdict(list)
    for rank in draft.ranks:
        if rank.state != "exited":
            by_agent[rank.agent_id].append(rank.rank)
    for incident in asking:
        for agent, ranks in sorted(by_agent.items()):
            draft.issue(agent, incident.incident_id, _Reading(draft, ranks, TakeDumps))
        draft.put_incident(replace(incident, dumps_asked_ns=draft.now_ns))


class _Reading:
    """The command that reads `ranks` of one node."""

    def __init__(
        self, draft: Draft, ranks: list[int], what: type[TakeStacks | TakeDumps] = TakeStacks
    ) -> None:
        self._draft = draft
        self._ranks = ranks
        self._what = what

    def __call__(self, command_id: int) -> Command:
        return self._what(
            command_id=command_id,
            job=self._draft.view.job_id,
            generation=self._draft.generation,
            ranks=self._ranks,
        )


def awaits_evidence(draft: Draft, incident: IncidentView) -> bool:
    """Whether killing the ranks now would destroy what is about to be read.

    Never for an incident that was acted on before: it is acted on again at once, or not at all.
    """
    if incident.action_ids:
        return False
    return _awaits_stacks(draft, incident) or _awaits_dumps(draft, incident)


def _awaits_dumps(draft: Draft, incident: IncidentView) -> bool:
    asked_ns = incident.dumps_asked_ns
    if asked_ns is None or incident.finding.dumps_told:
        return False
    return draft.now_ns - asked_ns < DUMP_GRACE_SECONDS * NANOSECONDS


def _awaits_stacks(draft: Draft, incident: IncidentView) -> bool:
    asked_ns = incident.stacks_asked_ns
    if asked_ns is None:
        return False
    if draft.now_ns - asked_ns >= GRACE_SECONDS * NANOSECONDS:
        return False
    findings = (incident.finding, *incident.symptoms)
    read = {stacks.rank for finding in findings for stacks in finding.stacks}
    alive = {rank.rank for rank in draft.ranks if rank.state != "exited"}
    return bool(alive & set(incident.stacks_asked) - read)
