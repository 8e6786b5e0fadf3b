"""Step 3 of a hang verdict: the culprits' cause, with the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from paceline_server.detect.causes.catalog import ENDED_EARLY, PROCESS_GONE, UNKNOWN
from paceline_server.detect.finding import Evidence, Side
from paceline_server.detect.hang.culprit import Culprits
from paceline_server.detect.hang.operation_text import numbered, operation_text
from paceline_server.detect.hang.rank_cause import (
    BUSY_GPU_PERCENT,
    IDLE_GPU_PERCENT,
    gpu_utilization,
    host_cause,
    operation_evidence,
    operation_of,
    process_cause,
    side_of,
)
from paceline_server.detect.hang.step_program import ProgramChannel
from paceline_server.detect.hang.wait_for_graph import (
    BlockedOperation,
    BlockReason,
    communication_frames,
)
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.rank_list import ranks_text
from paceline_wire import metric_names
from paceline_wire.ring import StateView
from paceline_wire.spans import op_name

MISMATCH = "mismatched collective"
DEADLOCK = "deadlock: ranks wait for each other"
_MAX_CULPRIT_STACKS = 3


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """The verdict on one hang.

    Attributes:
        ranks: The culprits, or all members of the communication that does not complete.
        is_single: The first of `ranks` is to blame.
        link: Source and destination of a transfer that does not complete.
        stacks_wanted: Ranks whose Python stacks should be read, most important first.
    """

    ranks: tuple[int, ...]
    cause: str
    side: Side
    evidence: Sequence[Evidence]
    counter_evidence: Sequence[Evidence] = ()
    is_single: bool = True
    link: tuple[int, int] | None = None
    stacks_wanted: Sequence[int] = field(default=())


def stopped_verdict(
    stopped: Sequence[LiveRank], views: Mapping[int, StateView], observation: Observation
) -> HangVerdict:
    """Return the verdict for processes that cannot run while all other ranks wait."""
    cause, evidence = process_cause(stopped[0]) or (UNKNOWN, [])
    ranks = tuple(live.rank for live in stopped)
    if len(ranks) > 1:
        evidence = [Evidence(f"{ranks_text(ranks)} are stopped or gone"), *evidence]
    waiting_rank = [rank for rank in views if rank not in ranks][:1]
    return HangVerdict(
        ranks,
        cause,
        "host",
        [*evidence, *operation_evidence(views, observation)],
        stacks_wanted=[*ranks[:_MAX_CULPRIT_STACKS], *waiting_rank],
    )


def verdict_on(
    culprits: Culprits | None,
    live: Mapping[int, LiveRank],
    without_page: frozenset[int],
    observation: Observation,
    generation: Generation,
) -> HangVerdict:
    """Return the verdict on the culprits.

    Args:
        culprits: None if no rank waits for another.
        live: Ranks with a recent state page.
        without_page: Ranks without one, although their node still sends batches.
        observation: The current tick.
        generation: Placement of the ranks.
    """
    views = {rank: live_rank.state.view for rank, live_rank in live.items() if live_rank.state}
    context = operation_evidence(views, observation) if len(views) > 1 else []
    if without_page:
        verb = "has" if len(without_page) == 1 else "have"
        context.append(Evidence(f"{ranks_text(without_page)} {verb} no recent state page"))
    if culprits is None:
        return _host_verdict_without_waits(live, context, observation, generation)
    if culprits.side == "device":
        return _communication_verdict(culprits, views, context, observation, generation)
    waiting_rank = _waiting_rank(culprits)
    if culprits.side == "mismatch":
        return mismatch_verdict(culprits, views, context, waiting_rank, observation)
    rank = culprits.ranks[0]
    cause, evidence = PROCESS_GONE, [Evidence(f"rank {rank} has no recent state page")]
    if rank in live:
        cause, evidence = host_cause(live[rank], observation, generation, views)
    elif rank in observation.exited:
        cause, evidence = ENDED_EARLY, [Evidence(f"rank {rank} has exited with code 0")]
    elif has_finished(observation.ranks.get(rank)):  # its process may still be ending
        cause, evidence = ENDED_EARLY, [Evidence(f"the training of rank {rank} is over")]
    return HangVerdict(
        culprits.ranks,
        cause,
        side_of(cause),
        [*evidence, *_dependents_evidence(culprits), *context],
        _other_stuck_ranks(culprits, views),
        stacks_wanted=[*culprits.ranks[:_MAX_CULPRIT_STACKS], *waiting_rank],
    )


def has_finished(live: LiveRank | None) -> bool:
    """Return whether the rank reports that its training is over."""
    return live is not None and live.status == "finished"


def _host_verdict_without_waits(
    live: Mapping[int, LiveRank],
    context: list[Evidence],
    observation: Observation,
    generation: Generation,
) -> HangVerdict:
    """Return the verdict if no rank waits for another, as far as the state pages show."""
    first = min(live)
    views = {rank: live_rank.state.view for rank, live_rank in live.items() if live_rank.state}
    cause, evidence = host_cause(live[first], observation, generation, views)
    operations = {
        operation_of(rank, live_rank.state.view, observation)
        for rank, live_rank in live.items()
        if live_rank.state
    }
    if len(live) > 1 and len(operations) == 1:
        evidence = [Evidence("all ranks are in the same operation, and none waits for another")]
    return HangVerdict(
        (first,) if len(live) == 1 else tuple(sorted(live)),
        cause,
        side_of(cause),
        [*evidence, *context],
        is_single=len(live) == 1,
        stacks_wanted=sorted(live)[:2],
    )


def _communication_verdict(
    culprits: Culprits,
    views: Mapping[int, StateView],
    context: list[Evidence],
    observation: Observation,
    generation: Generation,
) -> HangVerdict:
    """Return the verdict on a communication that all members launched and none completed.

    A member whose GPU is idle has not started it.
    """
    blocked = culprits.operations[0] if culprits.operations else None
    if blocked is None:
        members = culprits.ranks
        cause = "stuck on the device: launched, never completed"
        text = f"{ranks_text(members)} have launched the same communications, and none completes"
        evidence = [Evidence(text), *_dependents_evidence(culprits)]
    else:
        members = tuple(sorted(set(blocked.members)))
        operation = operation_text(
            blocked.rank, blocked.frame, observation.groups, observation.sections
        )
        cause = f"stuck in communication: {operation}"
        evidence = [Evidence(f"all members have entered it: {ranks_text(members)}")]
    utilization = {rank: gpu_utilization(rank, observation, generation) for rank in members}
    measured = {rank: percent for rank, percent in utilization.items() if percent is not None}
    idle = [rank for rank, percent in measured.items() if percent <= IDLE_GPU_PERCENT]
    busy = [rank for rank, percent in measured.items() if percent >= BUSY_GPU_PERCENT]
    link = None
    if blocked is not None and blocked.channel is not None and blocked.channel.kind != "group":
        peer = blocked.channel.number
        is_receive = blocked.channel.kind == "receive"
        link = (peer, blocked.rank) if is_receive else (blocked.rank, peer)
    is_single = len(idle) == 1 and len(busy) == len(members) - 1 > 0
    if is_single:
        text = f"the GPU of rank {idle[0]} is idle, the GPUs of all other members are busy in it"
        evidence.insert(
            0, Evidence(text, metric_names.GPU_UTIL, measured[idle[0]], BUSY_GPU_PERCENT)
        )
    return HangVerdict(
        (idle[0], *(rank for rank in members if rank != idle[0])) if is_single else members,
        cause,
        "device",
        [*evidence, *context],
        [Evidence("no member is stuck in host code")],
        is_single=is_single,
        link=link,
        stacks_wanted=idle[:1] + [rank for rank in members if rank not in idle[:1]][:1],
    )


def mismatch_verdict(
    culprits: Culprits,
    views: Mapping[int, StateView],
    context: list[Evidence],
    waiting_rank: list[int],
    observation: Observation,
) -> HangVerdict:
    wanted = [*culprits.ranks[:_MAX_CULPRIT_STACKS], *waiting_rank]
    if culprits.cycle:
        return _cycle_verdict(culprits, context, wanted, observation)
    blocked = next(
        operation for operation in culprits.operations if operation.reason is BlockReason.MISMATCH
    )
    mismatched = [rank for rank in culprits.ranks if rank in blocked.members]
    others = [rank for rank in blocked.members if rank not in mismatched and rank in views]
    entered = [
        Evidence(f"{ranks_text([rank])} entered {_entered_text(rank, blocked, views, observation)}")
        for rank in (*mismatched[:4], *others[:2])
    ]
    is_single = set(mismatched) != set(blocked.members)
    different_ops = _ops(mismatched, blocked, views, observation) - _ops(
        others, blocked, views, observation
    )
    difference = "operation" if different_ops else "size"
    return HangVerdict(
        culprits.ranks,
        f"{MISMATCH}: another {difference if is_single else 'one on each rank'}",
        "mismatch",
        [*entered, *_dependents_evidence(culprits), *context],
        is_single=is_single,
        stacks_wanted=wanted,
    )


def _cycle_verdict(
    culprits: Culprits, context: list[Evidence], wanted: list[int], observation: Observation
) -> HangVerdict:
    waits = "; ".join(
        f"rank {operation.rank} waits for {ranks_text(operation.targets)}"
        for operation in culprits.operations[:8]
    )
    if not culprits.ranks:
        ranks = tuple(sorted(culprits.cycle))
        return HangVerdict(
            ranks,
            DEADLOCK,
            "mismatch",
            [Evidence(waits), *context],
            is_single=False,
            stacks_wanted=ranks[:2],
        )
    departures = chain.from_iterable(
        _departure_evidence(rank, culprits, observation) for rank in culprits.ranks
    )
    return HangVerdict(
        culprits.ranks,
        _cycle_cause(culprits, observation),
        "mismatch",
        [*departures, Evidence(waits), *context],
        stacks_wanted=wanted,
    )


def _cycle_cause(culprits: Culprits, observation: Observation) -> str:
    """Return which communication the first culprit entered in another order, or not at all."""
    changes = culprits.departures.get(culprits.ranks[0], {})
    behind = [channel for channel, difference in changes.items() if difference <= 0]
    if behind:
        return f"{MISMATCH}: {_channel_text(behind[0], observation)} left out or overtaken"
    return f"{MISMATCH}: order differs from the other ranks'"


def _departure_evidence(rank: int, culprits: Culprits, observation: Observation) -> list[Evidence]:
    lines = []
    for channel, difference in culprits.departures.get(rank, {}).items():
        name = _channel_text(channel, observation, is_one=abs(difference) == 1)
        entered = f"entered another operation or size in the {name}"
        if difference:
            more = "fewer" if difference < 0 else "more"
            entered = f"entered {abs(difference)} {more} {name}"
        lines.append(Evidence(f"rank {rank} {entered} than at this point of its earlier steps"))
    return lines


def _channel_text(
    channel: ProgramChannel, observation: Observation, *, is_one: bool = False
) -> str:
    plural = "" if is_one else "s"
    if channel.kind == "group":
        return f"collective{plural} of {observation.groups.name_of(channel.number)}"
    if channel.kind == "send":
        return f"send{plural} to rank {channel.number}"
    return f"receive{plural} from rank {channel.number}"


def _entered_text(
    rank: int,
    blocked: BlockedOperation,
    views: Mapping[int, StateView],
    observation: Observation,
) -> str:
    """Return text such as `all_gather tp#5 of 4096 bytes`."""
    for progress in views[rank].groups:
        key = observation.groups.key(rank, progress.group)
        if blocked.channel and key == blocked.channel.number:
            name = observation.groups.name_of(blocked.channel.number)
            size = f" of {progress.bytes} bytes" if progress.bytes else ""
            return f"{op_name(progress.op)} {numbered(name, progress.entered)}{size}"
    return "nothing"


def _ops(
    ranks: Sequence[int],
    blocked: BlockedOperation,
    views: Mapping[int, StateView],
    observation: Observation,
) -> set[int]:
    return {
        progress.op
        for rank in ranks
        for progress in views[rank].groups
        if blocked.channel
        and observation.groups.key(rank, progress.group) == blocked.channel.number
    }


def _dependents_evidence(culprits: Culprits) -> list[Evidence]:
    if not culprits.dependents:
        return []
    wait = "waits" if len(culprits.dependents) == 1 else "wait"
    no_rank = "waits for no rank" if len(culprits.ranks) == 1 else "wait for no rank"
    text = f"{ranks_text(culprits.dependents)} {wait} for {ranks_text(culprits.ranks)}"
    return [Evidence(f"{text}, which {no_rank}")]


def _other_stuck_ranks(culprits: Culprits, views: Mapping[int, StateView]) -> list[Evidence]:
    others = [
        rank
        for rank, view in views.items()
        if not communication_frames(view) and rank not in culprits.ranks
    ]
    if not others:
        return []
    verb, pronoun = ("is", "it") if len(others) == 1 else ("are", "them")
    text = f"{ranks_text(others)} {verb} also stuck outside communication"
    return [Evidence(f"{text}, but no rank waits for {pronoun}")]


def _waiting_rank(culprits: Culprits) -> list[int]:
    """Return one rank that waits for the culprits: its stack shows where the job should be."""
    direct = [
        operation.rank for operation in culprits.operations if operation.rank not in culprits.ranks
    ]
    return sorted(direct)[:1] or sorted(culprits.dependents)[:1]
