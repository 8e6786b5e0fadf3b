"""The end of a synthetic job: a rank hangs or crashes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np

from paceline_evaluation.emission import GENERATION, JOB, all_ranks
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.program import WORLD
from paceline_evaluation.state_pages import Moment, view_at
from paceline_evaluation.synthetic_job import SyntheticJob
from paceline_evaluation.timeline import Durations, play
from paceline_wire.batch import Event, RankExited
from paceline_wire.ring import Frame, GroupProgress, StateView
from paceline_wire.spans import Op

HEARTBEAT_SECONDS = 0.5
_LONGEST_SILENCE_SECONDS = 30.0  # a hang not detected by then counts as a miss
_CRASH_MESSAGE = "CUDA error: an illegal memory access was encountered"
_PEER_MESSAGE = "RuntimeError: Connection closed by peer"


def hang(job: SyntheticJob, fault: TrialFault) -> None:
    """Make a rank block in one of its operations until the engine reports the hang."""
    culprit, chance = fault.ranks[0], job.chance
    durations = job.conditions.draw(fault.onset_step, 1)
    _hold(job, fault, durations)
    process_state, spins = _process(fault, chance)
    timeline = play(job.shape, job.program, durations, job.carry)
    begin = job.seconds
    job.emission.add_stretch(fault.onset_step, timeline, np.array([begin]), job.conditions.lengths)
    moved = [end[np.isfinite(end)] for end in timeline.end]
    blocked_seconds = begin + max((float(end.max()) for end in moved if end.size), default=0.0)
    moment = Moment(timeline, 0, fault.onset_step, begin)
    ranks = range(job.shape.world_size)
    views = {rank: view_at(job.emission, rank, moment) for rank in ranks}
    if fault.cause == "mismatch":
        views[culprit] = _skip_reduction(views[culprit])
    blocks = {rank: job.emission.block(rank, fault.onset_step, blocked_seconds) for rank in ranks}
    if fault.cause == "host":
        job.telemetry.idle = frozenset({culprit})
    for beat, at_seconds in enumerate(_beats(job, blocked_seconds)):
        for node, here in all_ranks(job.shape):
            events: list[Event] = []
            for rank in here:
                busy = rank != culprit or spins  # waiting ranks poll and use CPU time
                used = 100.0 + (HEARTBEAT_SECONDS * beat if busy else 0.0)
                state = process_state if rank == culprit else "R"
                page = job.emission.page(rank, views[rank], at_seconds, state, used)
                events.append(page)
            samples = job.sweep(node, fault.onset_step, at_seconds) if beat % 2 == 0 else []
            sent = [blocks[rank] for rank in here] if beat == 0 else []
            job.feed(node, at_seconds, events, sent, samples)
        if any(finding.kind == "hang" for finding in job.tick(at_seconds)):
            return


def _beats(job: SyntheticJob, blocked_seconds: float) -> Iterator[float]:
    starts = sorted(job.onsets.values())
    longest = max((after - before for before, after in pairwise(starts)), default=1.0)
    silence = max(_LONGEST_SILENCE_SECONDS, 4.0 * longest)
    for beat in range(int(silence / HEARTBEAT_SECONDS)):
        yield blocked_seconds + beat * HEARTBEAT_SECONDS


def _hold(job: SyntheticJob, fault: TrialFault, durations: Durations) -> None:
    """Make one duration of the rank infinite."""
    place = job.shape.topology.coordinates(fault.ranks[0])
    here = (place.dp_rank, place.tp_rank)
    if fault.cause == "mismatch":
        durations.after_pipeline[0, place.pp_rank, *here] = np.inf
    elif fault.cause == "host" and job.chance.random() < 0.3:
        durations.data[0, place.pp_rank, *here] = np.inf
    else:
        compute = durations.compute[place.pp_rank]
        compute[int(job.chance.integers(compute.shape[0])), 0, *here] = np.inf


def _process(fault: TrialFault, chance: np.random.Generator) -> tuple[str, bool]:
    """Return the state letter of the rank's process, and whether it uses CPU time."""
    if fault.cause == "host":
        return [("T", False), ("S", False), ("R", True)][int(chance.integers(3))]
    return ("R", True)


def _skip_reduction(view: StateView) -> StateView:
    """Return the page of a rank that skipped the reduction and entered the final exchange."""
    entered_ns = max([frame.start_ns for frame in view.frames], default=0) + 1_000_000
    groups = []
    frames = list(view.frames)
    for group in view.groups:
        if group.group == WORLD:
            sequence = group.left + 1
            group = GroupProgress(WORLD, sequence, group.left, entered_ns, Op.ALL_GATHER)
            frames.append(Frame(Op.ALL_GATHER, entered_ns, WORLD, None, sequence))
        groups.append(group)
    return msgspec.structs.replace(view, frames=frames, groups=groups)


def crash(job: SyntheticJob, fault: TrialFault) -> None:
    """Kill a rank; its peers lose their connections within half a second."""
    culprit, chance = fault.ranks[0], job.chance
    at_seconds = job.seconds + 0.05
    killed = bool(chance.random() < 0.5)
    _exit(job, culprit, at_seconds, signal=9 if killed else None, message=_CRASH_MESSAGE)
    job.tick(at_seconds)
    others = [rank for rank in range(job.shape.world_size) if rank != culprit]
    chance.shuffle(others)
    for place, other in enumerate(others):
        later = at_seconds + 0.1 + 0.5 * place / len(others)
        _exit(job, other, later, signal=None, message=_PEER_MESSAGE)
    for beat in range(1, 12):
        later = at_seconds + 0.6 + HEARTBEAT_SECONDS * beat
        for node, _ in all_ranks(job.shape):
            job.feed(node, later, [])
        job.tick(later)


def _exit(
    job: SyntheticJob, rank: int, at_seconds: float, *, signal: int | None, message: str
) -> None:
    event = RankExited(
        time_ns=job.emission.page_time_ns(rank, at_seconds),
        job=JOB,
        generation=GENERATION,
        rank=rank,
        pid=4000 + rank,
        exit_code=1 if signal is None else None,
        signal=signal,
        log_tail=message if signal is None else "",
    )
    job.feed(job.shape.node_number(rank), at_seconds, [event])
