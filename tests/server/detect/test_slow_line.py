"""The Python line in which a slow rank is more often than a peer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from timed_run import T0, TimedRun
from watched import Watched

from paceline_server.detect.slow_data.detector import SlowDataDetector
from paceline_server.detect.slow_line import LEAST_SAMPLES, LineSearch, SlowLine
from paceline_server.detect.straggler.detector import StragglerDetector
from paceline_wire.batch import RankProfile
from paceline_wire.stacks import Profile, ProfiledStack, StackFrame
from paceline_wire.topology import Topology

TRAIN = StackFrame("<module>", "train.py", 12)
NEXT = StackFrame("next_batch", "data.py", 30)
GET = StackFrame("Queue.get", "queue.py", 171, is_installed=True)
WAIT = StackFrame("Condition.wait", "threading.py", 320, is_installed=True)
BACKWARD = StackFrame("Tensor.backward", "torch/_tensor.py", 623, is_installed=True)
STEP = StackFrame("<module>", "train.py", 14)
FORWARD = StackFrame("forward", "model.py", 88)
TRAINER = StackFrame("train", "transformers/trainer.py", 2200, is_installed=True)
COLLATOR = StackFrame("__call__", "collators/pad.py", 9, is_installed=True)
LOADING = [WAIT, GET, NEXT, TRAIN]
COMPUTING = [FORWARD, STEP]
WAITING = [BACKWARD, STEP]


Stack = tuple[list[StackFrame], int]


def profile(
    rank: int, *stacks: Stack, workers: Sequence[Stack] = (), time_ns: int = 0
) -> RankProfile:
    main, of_workers = (
        Profile(sum(n for _, n in each), [ProfiledStack(frames, n) for frames, n in each])
        for each in (stacks, workers)
    )
    return RankProfile(
        time_ns=time_ns, job="job", generation=0, rank=rank, main=main, workers=of_workers
    )


def slow_line(slow: RankProfile, peer: RankProfile, *, of_workers: bool = False) -> SlowLine | None:
    seen = TimedRun(Topology(2), seed=1)
    seen.profiles = {slow.rank: slow, peer.rank: peer}
    search = LineSearch(of_workers, [slow.rank, peer.rank])
    assert search.finds(0, seen.observe()) == (search.line is not None)
    assert not search.finds(0, seen.observe()), "the same samples again"
    return search.line


def test_the_line_of_slow_data_is_one_of_the_workers_of_the_loader() -> None:
    slow = profile(1, (LOADING, 100), (WAITING, 100), workers=[([FORWARD], 390), ([GET], 10)])
    peer = profile(0, (WAITING, 200), workers=[([FORWARD], 100), ([GET], 300)])
    found = slow_line(slow, peer, of_workers=True)
    assert found is not None
    assert found.sentence == (
        "Its loader workers are in model.py:88 forward for 98% of the time, those of "
        "rank 0 for 25%."
    )
    alone = profile(1, (LOADING, 100), (WAITING, 100))
    found = slow_line(alone, peer, of_workers=True)
    assert found is not None
    assert found.sentence == "It is in data.py:30 next_batch for 50% of the time, rank 0 for 0%."
    assert slow_line(slow, alone, of_workers=True) is None, "the peer has no workers"


def test_the_line_is_the_innermost_one_of_the_script_with_what_it_calls() -> None:
    slow = profile(1, (LOADING, 80), (COMPUTING, 100), (WAITING, 20))
    peer = profile(0, (LOADING, 4), (COMPUTING, 96), (WAITING, 100))
    assert slow_line(slow, peer) == SlowLine(1, 0, False, NEXT, GET, 0.4, 0.02)


def test_without_a_line_of_the_script_it_is_one_of_a_package() -> None:
    slow = profile(1, ([COLLATOR, TRAINER], 80), ([FORWARD, TRAINER], 120))
    peer = profile(0, ([COLLATOR, TRAINER], 4), ([BACKWARD, TRAINER], 196))
    found = slow_line(slow, peer)
    assert found is not None
    assert found.line == FORWARD
    slow = profile(1, ([COLLATOR, TRAINER], 180), ([FORWARD, TRAINER], 20))
    found = slow_line(slow, peer)
    assert found is not None
    assert (found.line, found.called) == (COLLATOR, None)


@pytest.mark.parametrize(
    ("slow", "peer"),
    [
        pytest.param([], [], id="no sample"),
        pytest.param([(LOADING, LEAST_SAMPLES - 1)], [(WAITING, 200)], id="few samples"),
        pytest.param([(COMPUTING, 200)], [(COMPUTING, 200)], id="alike"),
        pytest.param([(LOADING, 110), (WAITING, 90)], [(LOADING, 90), (WAITING, 110)], id="luck"),
        pytest.param([([], 200)], [(WAITING, 200)], id="a main thread without a stack"),
    ],
)
def test_without_a_line_that_is_surely_slower_there_is_none(slow, peer) -> None:
    assert slow_line(profile(1, *slow), profile(0, *peer)) is None


def test_chance_finds_no_line() -> None:
    chance = np.random.default_rng(1)
    lines = [StackFrame("f", "train.py", number) for number in range(20)]
    found = 0
    for _ in range(300):
        drawn = [chance.multinomial(200, np.full(20, 0.05)) for _ in range(2)]
        two = [
            profile(rank, *(([line], int(n)) for line, n in zip(lines, counts, strict=True) if n))
            for rank, counts in enumerate(drawn)
        ]
        found += slow_line(*two) is not None
    assert found == 0


def slow_run() -> TimedRun:
    run = TimedRun(Topology(4), seed=7).watch(StragglerDetector)
    run.advance(50)
    run.slow = {2: 1.5}
    (found,) = run.advance(5)
    assert (found.rank, found.cause) == (2, "unknown")
    assert found.profiles_wanted == [2, 0]
    return run


def sampled(run: TimedRun, at_step: int) -> None:
    at_ns = T0 + at_step * run.step_ns
    run.profiles = {
        2: profile(2, (LOADING, 80), (COMPUTING, 120), time_ns=at_ns),
        0: profile(0, (COMPUTING, 120), (WAITING, 80), time_ns=at_ns),
    }


def test_a_straggler_of_unknown_cause_is_reported_again_with_its_line() -> None:
    run = slow_run()
    sampled(run, at_step=55)
    (found,) = run.advance(20)
    assert found.summary.endswith(
        " It is in data.py:30 next_batch for 40% of the time, rank 0 for 0%."
    )
    assert [one.text for one in found.evidence][1] == (
        "rank 2 is in data.py:30 next_batch, which calls queue.py:171 Queue.get, for 40% of the "
        "time, rank 0 for 0%"
    )
    assert found.cause == "unknown", "where it spends its time is no cause"


def test_samples_from_before_the_onset_say_nothing_about_it() -> None:
    run = slow_run()
    sampled(run, at_step=40)
    assert run.advance(20) == []


def test_a_rank_without_peers_is_not_sampled() -> None:
    run = TimedRun(Topology(1, 4, 1), seed=7).watch(StragglerDetector)
    run.advance(50)
    run.slow = {2: 1.5}
    (found,) = run.advance(5)
    assert found.profiles_wanted == [], "other stages have other lines"


def test_a_rank_with_late_data_is_reported_again_with_the_line_of_its_workers() -> None:
    job = SimulatedStep(
        Topology(8),
        one_forward_one_backward(1, 8),
        transfer_seconds=0.0003,
        jitter=0.03,
        late_data=dict.fromkeys(range(8), 0.001),
    )
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(job.play(step) for step in range(20))
    late = dataclasses.replace(job, late_data={**job.late_data, 2: 0.2})
    (found,) = watched.show(late.play(step) for step in range(20, 25))
    assert (found.rank, found.profiles_wanted) == (2, [2, 0])
    at_ns = late.play(26).ranks.end_ns.max()
    watched.profiles = {
        2: profile(2, (LOADING, 200), workers=[([FORWARD], 400)], time_ns=int(at_ns)),
        0: profile(0, (WAITING, 200), workers=[([GET], 400)], time_ns=int(at_ns)),
    }
    (found,) = watched.show(late.play(step) for step in range(25, 30))
    assert found.cause == "slow data loading"
    line = "Its loader workers are in model.py:88 forward for 100% of the time, those of rank 0"
    assert f" {line} for 0%." in found.summary
