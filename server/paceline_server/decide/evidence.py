"""Request Python stacks and Flight Recorder dumps of a hung job before it is killed, and samples
of the stacks of a slow rank and a peer, or of some ranks while nothing is wrong.

A restart waits for those of a hung job for a short time only: it wastes all its GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

from msgspec.structs import replace

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.nodes import is_progressing
from paceline_server.decide.types import IncidentView
from paceline_server.detect.kinds import SLOW_DATA, SLOWER_STEPS
from paceline_wire.commands import Command, TakeDumps, TakeProfiles, TakeStacks

# Reading stacks takes 0.1 s on an idle machine, and the command and its result take as long again.
GRACE_SECONDS = 1.0
# Longer than agents wait for a rank to write its dump. A rank that cannot write reports it at once.
DUMP_GRACE_SECONDS = 5.0
MAXIMUM_RANKS = 8  # ranks whose stacks are read, per incident
MAXIMUM_PROFILES = 4  # slow ranks whose stacks are sampled, per incident

# For how long stacks are sampled: at least so many seconds, and so many steps. A rank and its peer
# are sampled at the same time. One that is compared with its past needs more samples.
BESIDE_PEER = (10.0, 4.0)
ALONE = (30.0, 30.0)
MOST_SECONDS = 60.0
# While nothing is wrong, so that a later slowdown of all ranks can be compared with it.
FIRST_USUAL_NS = 60 * NANOSECONDS  # after the first step: the first minute is often not typical
USUAL_INTERVAL_NS = 3600 * NANOSECONDS
MAXIMUM_USUAL = 8  # ranks: the first of so many pipeline stages
MAXIMUM_OTHERS = 4  # and ranks without steps, such as a generator or a parameter server

# Kinds of findings of which the workers of data loaders are sampled too.
_WITH_WORKERS = frozenset({SLOW_DATA.name, SLOWER_STEPS.name})


def request_stacks(draft: Draft) -> None:
    """Request the stacks that findings ask for, once for each rank."""
    agents = _agents(draft)
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
            _issue(draft, incident.incident_id, wanted, agents, TakeStacks)
            asked = [*incident.stacks_asked, *wanted]
            draft.put_incident(replace(incident, stacks_asked=asked, stacks_asked_ns=draft.now_ns))


def request_profiles(draft: Draft) -> None:
    """Have the ranks that a finding asks for sampled at once: a slow one, and any peer of it."""
    agents = _agents(draft)
    for incident in draft.incidents():
        asked = list(incident.profiles_asked)
        for finding in (incident.finding, *incident.symptoms):
            wanted = finding.profiles_wanted
            is_open = finding.generation == draft.generation and not finding.cleared
            if not wanted or not is_open or not agents.keys() >= set(wanted):
                continue
            if wanted[0] in asked or len(asked) >= MAXIMUM_PROFILES:
                continue
            asked.append(wanted[0])
            workers = finding.kind in _WITH_WORKERS
            seconds = _sampled_seconds(draft, *(BESIDE_PEER if len(wanted) > 1 else ALONE))
            kind = partial(TakeProfiles, seconds=seconds, workers=workers)
            _issue(draft, incident.incident_id, wanted, agents, kind)
        if asked != incident.profiles_asked:
            draft.put_incident(replace(incident, profiles_asked=asked))


def request_usual_profiles(draft: Draft) -> None:
    """Have the first rank of each pipeline stage sampled, once per hour while nothing is slow.

    Ranks without steps are sampled as well: nobody else does what they do.
    """
    if draft.state != "running" or not is_progressing(draft) or _asks_for_profiles(draft):
        return
    experience = draft.experience
    if experience.sampled_generation != draft.generation:
        wait_ns = FIRST_USUAL_NS
    elif not draft.is_due(experience.sample_due_ns, USUAL_INTERVAL_NS):
        return
    else:
        wait_ns = USUAL_INTERVAL_NS
        agents = _agents(draft)
        leaders = draft.topology.stage_leaders[:MAXIMUM_USUAL]
        others = [rank.rank for rank in draft.ranks if rank.step is None][:MAXIMUM_OTHERS]
        ranks = dict.fromkeys([*leaders, *others])
        kind = partial(TakeProfiles, seconds=_sampled_seconds(draft, *ALONE), workers=True)
        _issue(draft, "", [rank for rank in ranks if rank in agents], agents, kind)
    draft.experience = replace(
        experience, sampled_generation=draft.generation, sample_due_ns=draft.now_ns + wait_ns
    )


def _sampled_seconds(draft: Draft, least_seconds: float, steps: float) -> float:
    return min(max(steps * (draft.view.step_seconds or 0.0), least_seconds), MOST_SECONDS)


def _asks_for_profiles(draft: Draft) -> bool:
    """Return whether something has become slow; what always was so is usual."""
    return any(
        finding.profiles_wanted and not finding.cleared and finding.persistence != "chronic"
        for incident in draft.incidents()
        for finding in (incident.finding, *incident.symptoms)
    )


def _agents(draft: Draft) -> dict[int, str]:
    """Return the agent of each rank that has not exited."""
    return {rank.rank: rank.agent_id for rank in draft.ranks if rank.state != "exited"}


def _issue(
    draft: Draft,
    reason: str,
    ranks: Iterable[int],
    agents: dict[int, str],
    kind: Callable[..., Command],
) -> None:
    """Issue a command about these ranks to each of their agents.

    `reason`: the id of the incident that it gathers evidence for; empty without one.
    """
    by_agent: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_agent[agents[rank]].append(rank)
    for agent, of_agent in sorted(by_agent.items()):
        draft.issue(agent, reason, _ReadCommand(draft, of_agent, kind))


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
    agents = _agents(draft)
    for incident in incidents:
        _issue(draft, incident.incident_id, agents, agents, TakeDumps)
        draft.put_incident(replace(incident, dumps_asked_ns=draft.now_ns))


class _ReadCommand:
    """Build the command of this kind that reads `ranks` on one node."""

    def __init__(self, draft: Draft, ranks: list[int], kind: Callable[..., Command]) -> None:
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
