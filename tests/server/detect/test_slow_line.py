"""The Python line in which a slow rank is more often than a peer, or than before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from timed_run import T0, TimedRun
from watched import Watched

from paceline_server.detect.contract import Detector
from paceline_server.detect.slow_data.detector import SlowDataDetector
from paceline_server.detect.slow_line import LEAST_SAMPLES, LineSearch, SlowLine
from paceline_server.detect.slower_steps.detector import SlowerStepsDetector
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
    rank: int, *stacks: Stack, workers: Sequence[Stack] = (), time_ns: int = 0, begun_ns: int = 0
) -> RankProfile:
    main, of_workers = (
        Profile(sum(n for _, n in each), [ProfiledStack(frames, n) for frames, n in each])
        for each in (stacks, workers)
    )
    return RankProfile(
        time_ns=time_ns,
        begun_ns=begun_ns,
        job="job",
        generation=0,
        rank=rank,
        main=main,
        workers=of_workers,
    )


def slow_line(slow: RankProfile, peer: RankProfile, *, of_workers: bool = False) -> SlowLine | None:
    seen = TimedRun(Topology(2), seed=1)
    seen.profiles = {slow.rank: [slow], peer.rank: [peer]}
    search = LineSearch(of_workers, [slow.rank, peer.rank])
    assert search.finds(0, seen.observe()) == (search.line is not None)
    assert not search.finds(0, seen.observe()), "the same samples again"
    return search.line


def test_the_line_of_slow_data_is_one_of_the_workers_of_the_loader() -> None:
    slow = profile(1, (LOADING, 100), (WAITING, 100), workers=[([FORWARD], 390), ([GET], 10)])
    peer = profile(0, (WAITING, 200), workers=[([FORWARD], 100), ([GET], 300)])
    found = slow_line(slow, peer, of_workers=True)
    assert found is not None
    assert found.sentence_about(1) == (
        "Its loader workers are in model.py:88 forward for 98% of the time, those of "
        "rank 0 for 25%."
    )
    alone = profile(1, (LOADING, 100), (WAITING, 100))
    found = slow_line(alone, peer, of_workers=True)
    assert found is not None
    assert (
        found.sentence_about(1)
        == "It is in data.py:30 next_batch for 50% of the time, rank 0 for 0%."
    )
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
        2: [profile(2, (LOADING, 80), (COMPUTING, 120), time_ns=at_ns)],
        0: [profile(0, (COMPUTING, 120), (WAITING, 80), time_ns=at_ns)],
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


def test_a_rank_that_always_was_slower_has_a_cost_and_a_line() -> None:
    job = SimulatedStep(Topology(4), one_forward_one_backward(1, 8), jitter=0.02, slow={2: 1.3})
    watched = Watched(StragglerDetector, job.topology)
    (found,) = watched.show(job.play(step) for step in range(60))
    assert (found.severity, found.profiles_wanted) == ("info", [2, 0])
    assert found.speedup == pytest.approx(1.3, rel=0.05)
    cost = f" It costs {found.cost_ratio:.0%} of step time; fixing it gives {found.speedup:.2f}x."
    assert found.summary.endswith(cost)
    at_ns = int(job.play(60).ranks.end_ns.max())
    watched.profiles = {
        2: [profile(2, (LOADING, 80), (COMPUTING, 120), time_ns=at_ns)],
        0: [profile(0, (COMPUTING, 120), (WAITING, 80), time_ns=at_ns)],
    }
    (again,) = watched.show(job.play(step) for step in range(60, 90))
    line = " It is in data.py:30 next_batch for 40% of the time, rank 0 for 0%."
    assert again.summary == found.summary + line
    assert again.fingerprint == found.fingerprint


def test_samples_from_before_the_onset_say_nothing_about_it() -> None:
    run = slow_run()
    sampled(run, at_step=40)
    assert run.advance(20) == []


def during(run: TimedRun, rank: int, *stacks: Stack, steps: tuple[int, int]) -> None:
    """Add samples that were taken in these steps."""
    begun_ns, time_ns = (T0 + step * run.step_ns for step in steps)
    of_rank = run.profiles.setdefault(rank, [])
    of_rank.append(profile(rank, *stacks, begun_ns=begun_ns, time_ns=time_ns))


def test_a_rank_without_peers_is_compared_with_itself_before() -> None:
    run = TimedRun(Topology(1, 4, 1), seed=7).watch(StragglerDetector)
    run.advance(50)
    during(run, 2, (COMPUTING, 540), (LOADING, 60), steps=(5, 45))
    run.slow = {2: 1.5}
    (found,) = run.advance(5)
    assert found.profiles_wanted == [2], "other stages have other lines"
    during(run, 2, (COMPUTING, 540), (LOADING, 60), steps=(45, 55))
    assert run.advance(20) == [], "some of these samples are from before the onset"
    during(run, 2, (COMPUTING, 360), (LOADING, 240), steps=(55, 95))
    (found, *_) = run.advance(30)
    assert found.summary.endswith(
        " It is in data.py:30 next_batch for 40% of the time, 10% before."
    )


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
        2: [profile(2, (LOADING, 200), workers=[([FORWARD], 400)], time_ns=int(at_ns))],
        0: [profile(0, (WAITING, 200), workers=[([GET], 400)], time_ns=int(at_ns))],
    }
    (found,) = watched.show(late.play(step) for step in range(25, 30))
    assert found.cause == "slow data loading"
    line = "Its loader workers are in model.py:88 forward for 100% of the time, those of rank 0"
    assert f" {line} for 0%." in found.summary


@pytest.mark.parametrize(
    ("since", "now", "step_seconds", "pauses"),
    [
        pytest.param([(COMPUTING, 600)], [(LOADING, 40), (COMPUTING, 560)], 0.1, [], id="found"),
        pytest.param([(COMPUTING, 600)], [(LOADING, 24), (COMPUTING, 576)], 0.1, [], id="little"),
        pytest.param(
            [(COMPUTING, 600)], [(LOADING, 40), (COMPUTING, 560)], 2.0, [], id="of a step"
        ),
        pytest.param(
            [(COMPUTING, 600)], [(LOADING, 40), (COMPUTING, 560)], 0.1, [(8, 11)], id="in a pause"
        ),
        pytest.param(
            [(COMPUTING, 600)], [(LOADING, 40), (COMPUTING, 560)], 0.1, [(108, 111)], id="now"
        ),
    ],
)
def test_a_rank_has_a_line_only_if_nothing_else_explains_the_change(
    request, since, now, step_seconds, pauses
) -> None:
    begun_ns, onset_ns, end_ns = (T0 + seconds * 10**9 for seconds in (0, 100, 130))
    run = TimedRun(Topology(1), seed=1)
    run.profiles[0] = [
        profile(0, *since, begun_ns=begun_ns, time_ns=begun_ns + 30 * 10**9),
        profile(0, *now, begun_ns=onset_ns, time_ns=end_ns),
    ]
    seen = dataclasses.replace(
        run.observe(),
        step_seconds=step_seconds,
        pauses=[(T0 + start * 10**9, T0 + end * 10**9) for start, end in pauses],
    )
    search = LineSearch(ranks=[0])
    assert search.finds(onset_ns, seen) == (request.node.callspec.id == "found")


def test_an_earlier_release_of_the_agent_has_no_start_of_the_samples() -> None:
    run = TimedRun(Topology(1), seed=1)
    onset_ns = T0 + 100 * 10**9
    before, now = [(COMPUTING, 600)], [(LOADING, 600)]
    run.profiles[0] = [
        profile(0, *before, time_ns=onset_ns - 1),
        profile(0, *now, time_ns=onset_ns + 60 * 10**9),
    ]
    assert not LineSearch(ranks=[0]).finds(onset_ns, run.observe())


@pytest.mark.parametrize(
    ("detector", "reason"),
    [
        (SlowerStepsDetector, "mostly in data loading, cause unknown. "),
        (SlowDataDetector, "Every rank has waited 80 ms per step for its data "),
    ],
)
def test_data_that_is_late_on_all_ranks_has_the_line_of_one(
    detector: type[Detector], reason: str
) -> None:
    job = SimulatedStep(Topology(4), one_forward_one_backward(1, 2), jitter=0.03)
    watched = Watched(detector, job.topology)
    watched.show(job.play(step) for step in range(60))
    late = dataclasses.replace(job, late_data=dict.fromkeys(range(4), 0.08))
    (found,) = watched.show(late.play(step) for step in range(60, 100))
    assert (found.profiles_wanted, ".py" in found.summary) == ([0], False)
    onset_ns, now_ns = (int(late.play(step).ranks.start_ns.min()) for step in (60, 100))
    watched.profiles[0] = [
        profile(0, (WAITING, 600), workers=[([GET], 600)], begun_ns=1, time_ns=onset_ns),
        profile(0, (LOADING, 600), workers=[([FORWARD], 600)], begun_ns=onset_ns, time_ns=now_ns),
    ]
    (found,) = watched.show(late.play(step) for step in range(100, 102))
    assert reason in found.summary
    assert found.summary.endswith(
        " Loader workers of rank 0 are in model.py:88 forward for 100% of the time, 0% before."
    )
    assert (
        "loader workers of rank 0 are in model.py:88 forward for 100% of the time, 0% before"
        in [one.text for one in found.evidence]
    )
