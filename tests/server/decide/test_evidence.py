"""Stacks and dumps of a hang are requested once and waited for briefly before the restart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide import evidence
from paceline_server.decide.draft import NANOSECONDS
from paceline_server.decide.evidence import DUMP_GRACE_SECONDS, GRACE_SECONDS
from paceline_server.detect.causes.catalog import PROCESS_STOPPED
from paceline_server.detect.finding import Finding
from paceline_server.policy import Policy
from paceline_wire.batch import RankStackTraces
from paceline_wire.commands import StopGeneration, TakeDumps, TakeProfiles, TakeStacks
from paceline_wire.stacks import StackFrame, ThreadStack

from .simulator import World

STACKS = ThreadStack("MainThread", [StackFrame("__next__", "data.py", 88)])


def hang(world: World, *read: int) -> Finding:
    """Return a hang of rank 5; the stacks of `read` have arrived."""
    stacks = [
        RankStackTraces(time_ns=1, job="j", generation=1, rank=r, threads=[STACKS]) for r in read
    ]
    return world.finding(
        "hang",
        cause=PROCESS_STOPPED,
        rank=5,
        node=world.home(5),
        severity="critical",
        can_checkpoint=False,
        stacks_wanted=[5, 0],
        stacks=stacks,
    )


def asked(world: World) -> list[tuple[str, list[int]]]:
    return [
        (one.agent_id, one.command.ranks)
        for one in world.commands
        if isinstance(one.command, TakeStacks)
    ]


def stops(world: World) -> int:
    return sum(isinstance(one.command, StopGeneration) for one in world.commands)


def test_stacks_of_the_culprit_and_a_witness_are_requested_once(world: World) -> None:
    world.tick((hang(world),))
    world.tick((hang(world),))
    assert asked(world) == [(world.home(0), [0]), (world.home(5), [5])]
    (incident,) = world.incidents.values()
    assert sorted(incident.stacks_asked) == [0, 5]


def test_the_restart_waits_for_the_stacks(world: World) -> None:
    world.tick((hang(world),))
    assert not stops(world)
    world.tick((hang(world, 5),))
    assert not stops(world)
    world.tick((hang(world, 5, 0),))
    assert stops(world)
    (incident,) = world.incidents.values()
    assert [stacks.rank for stacks in incident.finding.stacks] == [5, 0]


def test_the_restart_waits_for_stacks_only_briefly(world: World) -> None:
    world.tick((hang(world),))
    began = world.seconds
    world.until(lambda: stops(world) > 0)
    assert world.seconds - began <= GRACE_SECONDS + 0.5


def test_a_hang_without_wanted_stacks_is_restarted_immediately(world: World) -> None:
    world.tick((replace(hang(world), stacks_wanted=[]),))
    assert stops(world)


def test_stacks_are_requested_even_if_no_restart_follows() -> None:
    world = World(policy=Policy(mode="observe"))
    world.until_running(1)
    world.run(5.0)
    world.tick((hang(world),))
    world.run(5.0)
    assert len(asked(world)) == 2
    assert not stops(world)


def test_dumps_of_all_ranks_are_requested_once_and_waited_for(world: World) -> None:
    wants = replace(hang(world, 5, 0), dumps_wanted=True)
    world.tick((wants,))
    world.tick((wants,))
    asked = [one.command.ranks for one in world.commands if isinstance(one.command, TakeDumps)]
    assert sorted(rank for ranks in asked for rank in ranks) == list(range(8))
    world.run(GRACE_SECONDS)
    assert not stops(world)
    world.tick((replace(wants, dumps_reported=True),))
    world.run(0.5)
    assert stops(world)


def test_the_restart_does_not_wait_for_missing_dumps_forever(world: World) -> None:
    world.tick((replace(hang(world, 5, 0), dumps_wanted=True),))
    world.run(DUMP_GRACE_SECONDS - 0.5)
    assert not stops(world)
    world.run(1.0)
    assert stops(world)


def straggler(world: World, *wanted: int) -> Finding:
    return world.finding(
        "straggler",
        cause="unknown",
        rank=wanted[0],
        node=world.home(wanted[0]),
        slowdown=1.5,
        profiles_wanted=list(wanted),
    )


def profiled(world: World) -> list[tuple[str, list[int], float]]:
    return [
        (one.agent_id, one.command.ranks, one.command.seconds)
        for one in world.commands
        if isinstance(one.command, TakeProfiles)
    ]


def test_a_slow_rank_and_a_peer_are_sampled_at_once_and_once(world: World) -> None:
    world.tick((straggler(world, 5, 0),))
    world.tick((straggler(world, 5, 0),))
    assert profiled(world) == [(world.home(0), [0], 10.0), (world.home(5), [5], 10.0)]
    (incident,) = world.incidents.values()
    assert incident.profiles_asked == [5]


def test_a_peer_that_was_sampled_before_is_sampled_again_beside_another_slow_rank(
    world: World,
) -> None:
    world.tick((straggler(world, 5, 0),))
    world.tick((straggler(world, 3, 0),))
    assert [ranks for _, ranks, _ in profiled(world)].count([0]) == 2


def test_a_verdict_that_wants_none_has_nobody_sampled(world: World) -> None:
    world.tick((replace(straggler(world, 5, 0), profiles_wanted=[]),))
    assert profiled(world) == []


def test_of_a_rank_whose_data_is_late_the_loader_workers_are_sampled_too(world: World) -> None:
    world.tick((straggler(world, 5, 0),))
    world.tick((replace(straggler(world, 4, 0), kind="slow_data"),))
    commands = [one.command for one in world.commands if isinstance(one.command, TakeProfiles)]
    assert {rank: one.workers for one in commands for rank in one.ranks if rank} == {
        4: True,
        5: False,
    }


def test_a_slow_rank_without_a_peer_is_sampled_for_longer(world: World) -> None:
    world.tick((straggler(world, 5),))
    assert profiled(world) == [(world.home(5), [5], 30.0)]


def test_the_first_rank_of_each_stage_is_sampled_again_while_nothing_is_slow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "USUAL_INTERVAL_NS", 600 * NANOSECONDS)
    world.last_step = 100_000
    first = [(world.home(rank), [rank], 30.0) for rank in (0, 4)]
    world.run(45.0)
    assert profiled(world) == [], "the first minute is often not typical"
    world.run(15.0)
    assert profiled(world) == first
    world.run(500.0)
    assert profiled(world) == first
    slower = world.finding("slower_steps", cause="unknown", profiles_wanted=[1])
    world.tick((slower,))
    world.run(600.0)
    asked = [*first, (world.home(1), [1], 30.0)]
    assert profiled(world) == asked
    world.tick((replace(slower, cleared=True),))
    world.run(10.0)
    assert profiled(world) == asked + first


def test_a_rank_without_steps_is_sampled_with_the_first_ranks() -> None:
    world = World(last_step=100_000)
    world.stepless = {6}
    world.until_running(1)
    world.run(70.0)
    assert profiled(world) == [(world.home(rank), [rank], 30.0) for rank in (0, 4, 6)]


def test_a_rank_that_always_was_slower_does_not_end_the_hourly_samples(world: World) -> None:
    world.last_step = 100_000
    chronic = replace(straggler(world, 5, 4), persistence="chronic", severity="info")
    world.tick((chronic,))
    asked = [(world.home(5), [5, 4], 10.0)]
    assert profiled(world) == asked
    world.run(65.0)
    assert profiled(world) == [*asked, *((world.home(rank), [rank], 30.0) for rank in (0, 4))]


def test_a_restarted_job_is_sampled_after_its_first_minute(world: World) -> None:
    world.run(60.0)
    world.crash(5)
    before = profiled(world)
    world.run(70.0)
    assert world.generation == 2
    assert profiled(world)[len(before) :] == before
