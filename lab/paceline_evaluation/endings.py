"""How a synthetic job ends: a rank that stands still for good, or one that dies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np

from paceline_evaluation.emission import GENERATION, JOB, all_ranks
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.program import WORLD
from paceline_evaluation.standstill import Moment, view_at
from paceline_evaluation.synthetic_job import SyntheticJob
from paceline_evaluation.timeline import Durations, play
from paceline_wire.batch import Event, RankExited
from paceline_wire.ring import Frame, GroupProgress, StateView
from paceline_wire.spans import Op

HEARTBEAT_SECONDS = 0.5
_LONGEST_SILENCE_SECONDS = 30.0  # a hang that is not found by then is not found
_LAST_WORDS = "CUDA error: an illegal memory access was encountered"
_BROKEN = "RuntimeError: Connection closed by peer"


def hang(job: SyntheticJob, fault: TrialFault) -> None:
    """The rank never leaves one of its operations; all others come to wait for it."""
    culprit, chance = fault.ranks[0], job.chance
    durations = job.conditions.draw(fault.onset_step, 1)
    _hold(job, fault, durations)
    process_state, spins = _process(fault, chance)
    timeline = play(job.shape, job.program, durations, job.carry)
    begin = job.seconds
    job.emission.take_in(fault.onset_step, timeline, np.array([begin]), job.conditions.lengths)
    moved = [end[np.isfinite(end)] for end in timeline.end]
    stands = begin + max((float(end.max()) for end in moved if end.size), default=0.0)
    moment = Moment(timeline, 0, fault.onset_step, begin)
    ranks = range(job.shape.world_size)
    views = {rank: view_at(job.emission, rank, moment) for rank in ranks}
    if fault.cause == "mismatch":
        views[culprit] = _gone_on(views[culprit])
    blocks = {rank: job.emission.block(rank, fault.onset_step, stands) for rank in ranks}
    if fault.cause == "host":
        job.telemetry.idle = frozenset({culprit})
    for beat, at_seconds in enumerate(_beats(job, stands)):
        for node, here in all_ranks(job.shape):
            events: list[Event] = []
            for rank in here:
                busy = rank != culprit or spins  # a rank that waits for others polls
                used = 100.0 + (HEARTBEAT_SECONDS * beat if busy else 0.0)
                state = process_state if rank == culprit else "R"
                page = job.emission.page(rank, views[rank], at_seconds, state, used)
                events.append(page)
            samples = job.sweep(node, fault.onset_step, at_seconds) if beat % 2 == 0 else []
            sent = [blocks[rank] for rank in here] if beat == 0 else []
            job.feed(node, at_seconds, events, sent, samples)
        if any(finding.kind == "hang" for finding in job.tick(at_seconds)):
            return


def _beats(job: SyntheticJob, stands: float) -> Iterator[float]:
    starts = sorted(job.onsets.values())
    longest = max((after - before for before, after in pairwise(starts)), default=1.0)
    silence = max(_LONGEST_SILENCE_SECONDS, 4.0 * longest)
    for beat in range(int(silence / HEARTBEAT_SECONDS)):
        yield stands + beat * HEARTBEAT_SECONDS


def _hold(job: SyntheticJob, fault: TrialFault, durations: Durations) -> None:
    """Make something of the rank endless."""
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
    """(letter of its state, whether it uses a CPU)."""
    if fault.cause == "host":
        return [("T", False), ("S", False), ("R", True)][int(chance.integers(3))]
    return ("R", True)


def _gone_on(view: StateView) -> StateView:
    """The rank left the reduction out and went on to the exchange that ends the step."""
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
    """The rank is killed; its peers lose their connections within moments."""
    culprit, chance = fault.ranks[0], job.chance
    at_seconds = job.seconds + 0.05
    killed = bool(chance.random() < 0.5)
    _exit(job, culprit, at_seconds, signal=9 if killed else None, words=_LAST_WORDS)
    job.tick(at_seconds)
    others = [rank for rank in range(job.shape.world_size) if rank != culprit]
    chance.shuffle(others)
    for place, other in enumerate(others):
        later = at_seconds + 0.1 + 0.5 * place / len(others)
        _exit(job, other, later, signal=None, words=_BROKEN)
    for beat in range(1, 12):
        later = at_seconds + 0.6 + HEARTBEAT_SECONDS * beat
        for node, _ in all_ranks(job.shape):
            job.feed(node, later, [])
        job.tick(later)


def _exit(
    job: SyntheticJob, rank: int, at_seconds: float, *, signal: int | None, words: str
) -> None:
    event = RankExited(
        time_ns=job.emission.page_time_ns(rank, at_seconds),
        job=JOB,
        generation=GENERATION,
        rank=rank,
        pid=4000 + rank,
        exit_code=1 if signal is None else None,
        signal=signal,
        log_tail=words if signal is None else "",
    )
    job.feed(job.shape.node_number(rank), at_seconds, [event])
