"""Simulated incidents with a known cause: the reported ranks and kinds.

The tests do not require results that the dumps cannot determine: the culprit of a group in which
all ranks have launched a collective and no dump shows which kernels started; the culprit of only
two ranks that differ; a second culprit that no rank waits for yet, or that itself waits for the
first.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_incident import Instruction, Job, Rank, Shape

from paceline_server.flight_recorder import HangReport, analyze, dump_from

SHAPES = (
    Shape(2, 2, 2),
    Shape(1, 4, 2),
    Shape(2, 2, 4, layers=1),
    Shape(4, 1, 2),
    Shape(1, 2, 4),
    Shape(3, 2, 1),
    Shape(1, 4, 1, layers=1),
)
# hypothesis shrinks towards the simplest failing incident
INCIDENT = {
    "shape": st.sampled_from(SHAPES),
    "seed": st.integers(0, 2**20),
    "active_only": st.booleans(),
}
several = settings(max_examples=120, derandomize=True)


def judged(job: Job, without: frozenset[int] = frozenset(), **how: bool) -> HangReport:
    job.run()
    numbers = [rank.number for rank in job.ranks if rank.number not in without]
    return analyze({n: dump_from(job.document(n, **how), n) for n in numbers})


def any_rank(job: Job) -> Rank:
    return job.random.choice(job.ranks)


def any_position(job: Job, rank: Rank) -> int:
    """Draw a position before the last collective, in which all ranks take part, so that some rank
    waits."""
    return job.random.randrange(len(rank.program) - 2)


def size_of(job: Job, instruction: Instruction) -> int:
    return len(job.groups[instruction.group][1])


@several
@given(**INCIDENT)
def test_a_healthy_run_has_no_culprit(shape: Shape, seed: int, active_only: bool) -> None:
    found = judged(Job(shape, seed), active_only=active_only)
    assert (found.culprits, found.kind, found.first_missing) == ((), None, None)
    assert found.verdict.startswith("No hang")


@several
@given(**INCIDENT)
def test_a_rank_that_stops_on_the_host_is_named(shape: Shape, seed: int, active_only: bool) -> None:
    job = Job(shape, seed)
    rank = any_rank(job)
    rank.stalls_at = any_position(job, rank)
    found = judged(job, active_only=active_only)
    assert (found.culprits, found.kind, found.is_certain) == ((rank.number,), "host", True)
    assert found.first_missing is not None
    assert rank.number in found.first_missing.not_launched_by


@several
@given(**INCIDENT, count=st.integers(2, 3))
def test_of_several_stopped_ranks_only_such_are_named_and_all_that_are_waited_for(
    shape: Shape, seed: int, active_only: bool, count: int
) -> None:
    job = Job(shape, seed)
    for rank in job.random.sample(job.ranks, min(count, len(job.ranks))):
        rank.stalls_at = any_position(job, rank)
    found = judged(job, active_only=active_only)
    assert found.kind == "host"
    assert set(found.culprits) <= job.reached_stall()
    waited_for = {r for standing in found.ranks for r in standing.waits_for}
    # As far as the dumps show, a rank whose send is not received also waits.
    idle = {r for r in job.reached_stall() if all(e.completed for e in job.ranks[r].launched)}
    assert idle & waited_for <= set(found.culprits)


@several
@given(**INCIDENT)
def test_a_dead_rank_leaves_no_dump_and_is_named(
    shape: Shape, seed: int, active_only: bool
) -> None:
    job = Job(shape, seed)
    rank = any_rank(job)
    rank.stalls_at = any_position(job, rank)
    found = judged(job, without=frozenset({rank.number}), active_only=active_only)
    assert (found.culprits, found.kind) == ((rank.number,), "host")
    assert found.without_dump == (rank.number,)


@several
@given(**INCIDENT)
def test_a_lost_dump_of_a_waiting_rank_does_not_hide_the_culprit(
    shape: Shape, seed: int, active_only: bool
) -> None:
    job = Job(shape, seed)
    rank = any_rank(job)
    rank.stalls_at = any_position(job, rank)
    job.run()
    # The wait of this rank is not needed to find the culprit from the others.
    witnesses = [r.number for r in job.ranks if r is not rank and shape.pp == 1]
    lost = frozenset(witnesses[:1])
    found = judged(job, without=lost, active_only=active_only)
    assert rank.number in found.culprits
    # A rank that others wait for and that left no dump may be dead as well.
    assert set(found.culprits) <= {rank.number} | lost


@several
@given(**INCIDENT, timed=st.booleans())
def test_a_stopped_device_is_distinguished_from_a_stopped_host(
    shape: Shape, seed: int, active_only: bool, timed: bool
) -> None:
    job = Job(shape, seed)
    rank = any_rank(job)
    launches = [i for i in rank.program if i.kind != "sync"]
    rank.device_stalls_at = job.random.choice(
        [index for index, i in enumerate(launches) if i.kind != "send"]
    )
    stalled = launches[rank.device_stalls_at]
    if stalled.kind == "collective" and size_of(job, stalled) == 1:
        return  # no rank waits in it
    found = judged(job, active_only=active_only, timed=timed)
    assert found.kind == "device"
    assert rank.number in found.culprits
    if timed:
        assert found.culprits == (rank.number,)
    else:
        assert found.is_certain is (len(found.culprits) == 1)


@settings(several, max_examples=60)
@given(**INCIDENT, ahead=st.integers(0, 3))
def test_a_host_that_stops_with_its_device_shows_which_device(
    shape: Shape, seed: int, active_only: bool, ahead: int
) -> None:
    """An example is a device-side assertion, after which the next call of the host fails."""
    job = Job(shape, seed)
    rank = any_rank(job)
    shared = [
        position
        for position, i in enumerate(rank.program)
        if i.kind == "collective" and size_of(job, i) > 1
    ]
    position = job.random.choice(shared)
    rank.device_stalls_at = sum(i.kind != "sync" for i in rank.program[:position])
    rank.stalls_at = position + 1 + ahead
    found = judged(job, active_only=active_only)
    assert found.kind == "device"
    assert rank.number in found.culprits
    if found.is_certain:
        assert found.culprits == (rank.number,)
        waiting = [standing for standing in found.ranks if standing.state == "waiting"]
        assert any(standing.waits_for == (rank.number,) for standing in waiting)


@several
@given(**INCIDENT, how=st.sampled_from(["op", "elements"]))
def test_a_rank_that_launches_something_else_is_named(
    shape: Shape, seed: int, active_only: bool, how: str
) -> None:
    job = Job(shape, seed)
    rank = any_rank(job)
    instruction = job.random.choice([i for i in rank.program if i.kind == "collective"])
    if size_of(job, instruction) == 1 or (how == "elements" and instruction.op == "all_to_all"):
        return  # all-to-all has uneven sizes by design
    if how == "op":
        instruction.op = "barrier"
    else:
        instruction.elements += 1
    found = judged(job, active_only=active_only)
    assert found.kind == "mismatch"
    assert rank.number in found.culprits
    if size_of(job, instruction) > 2:
        assert (found.culprits, found.is_certain) == ((rank.number,), True)
        assert found.first_missing is not None
        assert found.first_missing.differing == (rank.number,)
        assert found.first_missing.op != "barrier"


@several
@given(**INCIDENT)
def test_a_rank_that_launches_in_another_order_is_named(
    shape: Shape, seed: int, active_only: bool
) -> None:
    job = Job(shape, seed)
    rank = any_rank(job)
    program = rank.program
    swappable = [
        index
        for index in range(len(program) - 1)
        if program[index].kind == program[index + 1].kind == "collective"
        and program[index].group != program[index + 1].group
    ]
    if not swappable:
        return
    index = job.random.choice(swappable)
    program[index], program[index + 1] = program[index + 1], program[index]
    found = judged(job, active_only=active_only)
    if all(r.idle() for r in job.ranks):
        assert found.culprits == ()  # no cycle: the job completed
    else:
        assert found.kind == "mismatch"
        assert rank.number in found.culprits


def test_two_culprits_in_a_chain_are_both_named() -> None:
    """Rank 3 waits for rank 0 too, but its tensor peer, which also waits, is further ahead."""
    job = Job(Shape(1, 1, 4, layers=2), seed=5)
    stalled = job.ranks[0], job.ranks[3]
    stalled[0].stalls_at = 1  # before the first expert all-to-all
    stalled[1].stalls_at = 2
    # The host does not wait, so that it runs ahead.
    for rank in job.ranks:
        rank.program = [i for i in rank.program if i.kind != "sync"]
    found = judged(job, active_only=True)
    assert found.culprits == (0, 3)
    assert found.first_missing is not None
    assert found.first_missing.process_group.ranks == (0, 1, 2, 3)


def test_a_culprit_that_waits_for_nobody_is_named_before_anybody_comes_to_wait_for_it() -> None:
    """Rank 0 waits for the other stage first, and for rank 1 only after that."""
    job = Job(Shape(1, 2, 2, microbatches=1), seed=3)
    for rank in job.ranks:
        rank.program = [i for i in rank.program if i.kind != "sync"]
    job.ranks[1].stalls_at = next(
        n for n, i in enumerate(job.ranks[1].program) if (i.kind, i.tag) == ("recv", 1000)
    )
    # In the backward whose result rank 1 would receive.
    job.ranks[3].stalls_at = -2 + next(
        n for n, i in enumerate(job.ranks[3].program) if (i.kind, i.tag) == ("send", 1000)
    )
    found = judged(job)
    assert (found.culprits, found.kind) == ((1, 3), "host")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_has_a_standing(shape: Shape) -> None:
    job = Job(shape, seed=2)
    job.ranks[-1].stalls_at = 3
    found = judged(job)
    assert [standing.rank for standing in found.ranks] == list(range(shape.world_size))
    culprit = found.ranks[-1]
    assert (culprit.state, culprit.waits_for) == ("culprit", ())
    for standing in found.ranks[:-1]:
        if standing.state == "waiting":
            assert standing.waits_in is not None
            assert standing.waits_for
    enqueued = {g.process_group: g.last_enqueued for g in culprit.groups}
    counts = job.ranks[-1].counts
    assert all(
        enqueued.get(group) == count for (group, _), count in counts.items() if group in enqueued
    )
