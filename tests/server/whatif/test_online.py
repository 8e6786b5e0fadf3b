"""The replay of a running job predicts the gain of a fix."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from played_run import REDUCTION_SECONDS, PlayedRun

from paceline_server.steps.timing import CollectiveTimes, ComputeTimes, StepTiming, TransferTimes
from paceline_server.whatif.online import RunReplay
from paceline_server.whatif.schedules import actions
from paceline_server.whatif.verdict import judge
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

PIPELINE = Topology(dp=2, pp=4, tp=1)
ALL_AXES = Topology(dp=2, pp=2, tp=2)
DATA_PARALLEL = Topology(dp=4)


def measured(topology: Topology, **run: Any) -> tuple[RunReplay, float]:
    timings, seconds = PlayedRun(topology, **run).play()
    return RunReplay(timings, topology, {}), float(seconds.mean())


def rows_of(table: Any, kept: Any) -> Any:
    return replace(
        table, **{field.name: getattr(table, field.name)[kept] for field in fields(table)}
    )


def without_some_records(timing: StepTiming, share: float, seed: int) -> StepTiming:
    chance = np.random.default_rng(seed + timing.step)
    compute, transfers = timing.compute, timing.transfers
    return replace(
        timing,
        compute=rows_of(compute, chance.random(compute.rank.size) >= share),
        transfers=rows_of(transfers, chance.random(transfers.source.size) >= share),
    )


def without_ranks(timing: StepTiming, *ranks: int) -> StepTiming:
    transfers = timing.transfers
    removed = np.isin(transfers.source, ranks) | np.isin(transfers.destination, ranks)
    return replace(
        timing,
        ranks=rows_of(timing.ranks, ~np.isin(timing.ranks.rank, ranks)),
        compute=rows_of(timing.compute, ~np.isin(timing.compute.rank, ranks)),
        transfers=rows_of(transfers, ~removed),
    )


def with_evaluation(timing: StepTiming, shift_ns: int) -> StepTiming:
    """Add an evaluation: forwards without hooks, so that only their transfers are recorded."""
    transfers = timing.transfers
    evaluated = (transfers.op == Op.FORWARD_SEND) & (transfers.microbatch < 4)
    evaluation = rows_of(transfers, evaluated)
    columns = {field.name: getattr(evaluation, field.name) for field in fields(evaluation)}
    for name in ("send_start_ns", "receive_start_ns", "end_ns"):
        columns[name] = columns[name] + shift_ns
    columns["transfer_seconds"] = columns["transfer_seconds"] + 0.5
    joined = {
        name: np.concatenate([getattr(transfers, name), values]) for name, values in columns.items()
    }
    return replace(timing, transfers=TransferTimes(**joined))


RUNS = [
    (PIPELINE, {"schedule": "gpipe"}),
    (PIPELINE, {"schedule": "1f1b"}),
    (PIPELINE, {"schedule": "interleaved", "chunks": 2}),
    (PIPELINE, {"schedule": "zero_bubble"}),
    (ALL_AXES, {}),
    (Topology(dp=4), {}),
    (Topology(pp=3), {}),
    (Topology(tp=4), {}),
]


@pytest.mark.parametrize(("topology", "run"), RUNS)
def test_replay_predicts_the_cost_of_a_slow_rank(topology: Topology, run: dict[str, Any]) -> None:
    slow = topology.world_size - 1
    _, healthy = measured(topology, jitter=0.02, **run)
    replay, seconds = measured(topology, jitter=0.02, slow={slow: 1.4}, **run)
    assert seconds / healthy > 1.1
    assert replay.speedup(ranks=[slow]) == pytest.approx(seconds / healthy, rel=0.01)
    assert replay.speedup(ranks=[0]) == pytest.approx(1.0, abs=0.015)


@pytest.mark.parametrize(("topology", "run"), RUNS)
def test_replay_takes_as_long_as_the_recording(topology: Topology, run: dict[str, Any]) -> None:
    replay, seconds = measured(topology, jitter=0.1, slow={0: 1.2}, **run)
    analysis = replay.analysis
    assert analysis is not None
    assert analysis.original_seconds == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("topology", [PIPELINE, ALL_AXES, Topology(dp=4), Topology()])
def test_replay_predicts_the_cost_of_slow_data(topology: Topology) -> None:
    _, healthy = measured(topology)
    replay, seconds = measured(topology, data_seconds={0: 0.101})
    assert replay.speedup(excess_seconds={0: 0.1}) == pytest.approx(seconds / healthy, rel=0.002)


@pytest.mark.parametrize("topology", [PIPELINE, ALL_AXES, Topology(dp=4), Topology()])
def test_replay_predicts_the_gain_of_data_in_time(topology: Topology) -> None:
    _, healthy = measured(topology)
    replay, seconds = measured(topology, data_seconds={0: 0.101})
    gain = replay.speedup(data_wait_limits={0: 0.001})
    assert gain == pytest.approx(seconds / healthy, rel=0.002)
    assert replay.speedup(data_wait_limits={0: 0.2, 99: 0.0}) == pytest.approx(1.0)


def test_excess_beyond_the_data_wait_is_removed_from_the_rest_of_the_step() -> None:
    _, healthy = measured(PIPELINE)
    replay, seconds = measured(PIPELINE, slow={5: 1.5})
    gain = replay.speedup(excess_seconds={5: 0.5 * 8 * 0.06})
    assert gain == pytest.approx(seconds / healthy, rel=0.01)


def test_pause_is_removed_from_the_operation_that_it_lengthened() -> None:
    _, healthy = PlayedRun(PIPELINE).play()
    paused, seconds = PlayedRun(PIPELINE, pauses={(4, 0): 0.12}).play()
    assert seconds.mean() / healthy.mean() > 1.1
    gain = RunReplay(paused, PIPELINE, {}).speedup(excess_seconds={4: 0.12})
    assert gain == pytest.approx(seconds.mean() / healthy.mean(), rel=0.01)


def test_replay_predicts_the_cost_of_a_slow_link() -> None:
    link = (PIPELINE.rank(0, 1, 0), PIPELINE.rank(0, 2, 0))
    _, healthy = measured(PIPELINE)
    replay, seconds = measured(PIPELINE, link_seconds={(0, 1): 0.03})
    assert seconds / healthy > 1.2
    assert replay.speedup(links=[link]) == pytest.approx(seconds / healthy, rel=0.002)
    assert replay.speedup(links=[(0, PIPELINE.rank(0, 1, 0))]) == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize("skew_seconds", [0.0, 0.005])
@pytest.mark.parametrize("topology", [Topology(dp=2, pp=4), Topology(pp=4), Topology(2, 2, 2)])
def test_sender_blocked_by_a_slow_receiver_is_not_slow(
    topology: Topology, skew_seconds: float
) -> None:
    run: dict[str, Any] = {
        "schedule": "gpipe",
        "blocking_sends": True,
        "skew_seconds": lambda rank: skew_seconds * (rank % 2),
    }
    receiver = topology.rank(0, topology.pp - 1, 0)
    sender = topology.rank(0, topology.pp - 2, 0)
    _, healthy = measured(topology, **run)
    replay, seconds = measured(topology, slow={receiver: 1.5}, **run)
    assert seconds / healthy > 1.15
    assert replay.speedup(ranks=[receiver]) == pytest.approx(seconds / healthy, rel=0.001)
    assert replay.speedup(ranks=[sender]) == pytest.approx(1.0, abs=0.015)
    analysis = replay.analysis
    assert analysis is not None
    assert analysis.original_seconds == pytest.approx(seconds, rel=0.001)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_sends_awaited_at_the_end_block_no_earlier_operation(schedule: str, chunks: int) -> None:
    run: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "awaited_sends": True}
    _, healthy = measured(PIPELINE, **run)
    replay, seconds = measured(PIPELINE, slow={6: 1.5}, **run)
    assert replay.speedup(ranks=[6]) == pytest.approx(seconds / healthy, rel=0.001)
    assert replay.speedup(ranks=[4]) == pytest.approx(1.0, abs=0.001)
    assert replay.analysis is not None
    assert replay.analysis.original_seconds == pytest.approx(seconds, rel=0.001)


def test_replay_predicts_the_gain_of_balancing_the_stages() -> None:
    replay, seconds = measured(PIPELINE, stage_pace={3: 1.5})
    _, shared = measured(PIPELINE, stage_pace={3: 1.125})
    assert replay.speedup(stages=[3]) == pytest.approx(seconds / shared, rel=0.01)
    analysis = replay.analysis
    assert analysis is not None
    assert analysis.m_s is not None
    assert analysis.m_s > 0.9
    by_stage = analysis.slowdown_by_stage
    assert max(by_stage, key=lambda stage: by_stage[stage]) == 3
    best = replay.fixes()[0]
    assert (best.kind, best.target) == ("stage", "stage 3")
    assert best.speedup == pytest.approx(seconds / shared, rel=0.01)


def test_rank_without_peers_is_compared_with_other_stages() -> None:
    topology = Topology(pp=4)
    timings, seconds = PlayedRun(topology, slow={1: 1.4}).play()
    _, healthy = PlayedRun(topology).play()
    gain = RunReplay(timings, topology, {}).speedup(ranks=[1])
    assert gain == pytest.approx(seconds.mean() / healthy.mean(), rel=0.01)


def test_speedup_is_unknown_without_any_peers() -> None:
    one_rank, _ = measured(Topology(), slow={0: 1.4})
    assert one_rank.speedup(ranks=[0]) is None
    assert one_rank.slowdown() == pytest.approx(1.0)
    one_link, _ = measured(Topology(pp=2), link_seconds={(0, 0): 0.05})
    assert one_link.speedup(links=[(0, 1)]) is None
    assert one_link.speedup(excess_seconds={0: 0.001}) is not None
    one_group, _ = measured(Topology(dp=2))
    assert one_group.speedup(links=[(0, 1)]) is None


def test_comparison_with_other_stages_accounts_for_layers() -> None:
    topology = Topology(pp=2)
    pace = {0: 3.0, 1: 1.0}
    timings, _ = PlayedRun(topology, stage_pace=pace).play()
    uneven = RunReplay(timings, topology, {"stage_layers": "3,1"})
    assert uneven.speedup(ranks=[0]) == pytest.approx(1.0, abs=0.01)
    even = RunReplay(timings, topology, {"stage_layers": "1,1"}).speedup(ranks=[0])
    assert even is not None
    assert even > 1.5


def test_steps_before_the_onset_can_be_left_out() -> None:
    healthy, _ = PlayedRun(PIPELINE).play()
    slow, _ = PlayedRun(PIPELINE, slow={5: 1.5}).play()
    onset = len(healthy)
    late = [replace(timing, step=timing.step + onset) for timing in slow]
    replay = RunReplay([*healthy, *late], PIPELINE, {})
    only_slow = RunReplay(slow, PIPELINE, {}).speedup(ranks=[5])
    assert only_slow is not None
    assert replay.speedup(ranks=[5], since_step=onset) == pytest.approx(only_slow, rel=0.001)
    mixed = replay.speedup(ranks=[5])
    assert mixed is not None
    assert 1.05 < mixed < only_slow - 0.05
    assert replay.speedup(ranks=[5], since_step=10**6) == mixed


@pytest.mark.parametrize("seed", range(3))
def test_fixed_rank_keeps_the_lengths_of_its_microbatches(seed: int) -> None:
    """A fix makes a rank faster, but not its sequences shorter."""
    run: dict[str, Any] = {"jitter": 0.03, "seed": seed, "spread": 3.0, "steps": 8}
    topology = Topology(dp=8, pp=4)
    healthy, seconds = measured(topology, **run)
    replay, slower = measured(topology, slow={9: 1.5}, **run)
    assert replay.speedup(ranks=[9]) == pytest.approx(slower / seconds, rel=0.015)
    assert healthy.speedup(ranks=[9]) == pytest.approx(1.0, abs=0.015)


def test_analysis_names_the_slow_worker() -> None:
    analysis = measured(Topology(dp=8, pp=4), jitter=0.02, slow={13: 1.5})[0].analysis
    assert analysis is not None
    assert analysis.slowest_workers[:1] == (13,)
    assert analysis.m_w is not None
    assert analysis.m_w > 0.8
    assert analysis.slowdown > 1.1
    assert list(analysis.slowdown_by_step) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("slow", "kind", "target"),
    [
        ({5: 1.5}, "rank", "rank 5"),
        ({4: 1.5, 5: 1.45}, "worker", "ranks 4-5"),
        ({0: 1.4, 1: 1.4, 4: 1.4, 5: 1.4}, "dp_rank", "dp rank 0"),
    ],
)
def test_best_fix_is_the_smallest_part_with_the_full_gain(
    slow: dict[int, float], kind: str, target: str
) -> None:
    _, healthy = measured(ALL_AXES, jitter=0.02)
    replay, seconds = measured(ALL_AXES, jitter=0.02, slow=slow)
    best = replay.fixes()[0]
    assert (best.kind, best.target) == (kind, target)
    assert best.speedup == pytest.approx(seconds / healthy, rel=0.03)


def test_gain_in_the_verdict_is_that_of_the_part_it_names() -> None:
    """The other rank of the worker is slightly slow too, but the verdict does not name it."""
    replay, _ = measured(ALL_AXES, jitter=0.02, slow={4: 1.03, 5: 1.5})
    verdict, best = replay.verdict(), replay.fixes()[0]
    assert verdict is not None
    assert verdict.target == best.target == "rank 5"
    assert f"fixing it gives {best.speedup:.2f}x" in verdict.text


def test_replay_predicts_the_gain_of_fixing_an_operation_type() -> None:
    _, healthy = measured(PIPELINE)
    replay, seconds = measured(PIPELINE, link_seconds={(0, 0): 0.03, (1, 2): 0.03})
    gain = replay.speedup(optypes=["forward-pp-comm", "backward-pp-comm"])
    assert gain == pytest.approx(seconds / healthy, rel=0.01)


def test_verdict_distinguishes_late_data_from_a_slow_node() -> None:
    topology = Topology(dp=8, pp=2)
    late = measured(topology, data_seconds={3: 0.2})[0].analysis
    slow = measured(topology, slow={3: 1.5})[0].analysis
    assert late is not None
    assert slow is not None
    assert judge(late).text.endswith(": data arrives late, check the data loader.")
    assert judge(slow).text.endswith("check the node.")


def test_data_that_is_late_on_changing_ranks_is_not_blamed_on_the_network() -> None:
    timings = []
    for step in range(4):
        run = PlayedRun(DATA_PARALLEL, steps=step + 1, data_seconds={step: 0.2})
        timings.append(run.play()[0][step])
    replay = RunReplay(timings, DATA_PARALLEL, {})
    assert replay.analysis is not None
    verdict = judge(replay.analysis)
    assert (verdict.kind, verdict.target) == ("slow_data", "data-wait")
    assert "check the data loaders" in verdict.text


def test_healthy_run_has_no_fixes_with_a_gain() -> None:
    replay, _ = measured(Topology(dp=4, pp=4), jitter=0.01, skew_seconds=lambda rank: rank * 1e-3)
    slowdown = replay.slowdown()
    assert slowdown is not None
    assert slowdown < 1.03
    for rank in range(16):
        assert replay.speedup(ranks=[rank]) == pytest.approx(1.0, abs=0.01)
    assert all(fix.speedup < 1.03 for fix in replay.fixes())


@pytest.mark.parametrize("topology", [PIPELINE, ALL_AXES, Topology(dp=8, pp=4)])
@pytest.mark.parametrize("seed", range(3))
def test_prediction_holds_with_clock_skew_and_missing_spans(topology: Topology, seed: int) -> None:
    chance = np.random.default_rng(seed)
    skew = chance.uniform(-5e-3, 5e-3, topology.world_size)
    slow = int(chance.integers(topology.world_size))
    run: dict[str, Any] = {"jitter": 0.03, "seed": seed, "schedule": "1f1b"}
    _, healthy = measured(topology, **run)
    timings, seconds = PlayedRun(
        topology, slow={slow: 1.4}, skew_seconds=lambda rank: float(skew[rank]), **run
    ).play()
    replay = RunReplay(
        [without_some_records(timing, 0.03, seed) for timing in timings], topology, {}
    )
    assert replay.speedup(ranks=[slow]) == pytest.approx(seconds.mean() / healthy, rel=0.03)


@pytest.mark.parametrize("shift_ns", [10_000_000_000, -10_000_000_000])
@pytest.mark.parametrize(
    ("topology", "schedule"),
    [(PIPELINE, "1f1b"), (PIPELINE, "gpipe"), (ALL_AXES, "1f1b"), (Topology(pp=3), "zero_bubble")],
)
def test_evaluation_within_a_step_is_left_out(
    topology: Topology, schedule: str, shift_ns: int
) -> None:
    """The evaluation runs after the training of a step, or before it."""
    slow = topology.world_size - 1
    timings, seconds = PlayedRun(topology, schedule, slow={slow: 1.4}).play()
    _, healthy = PlayedRun(topology, schedule).play()
    timings[1] = with_evaluation(timings[1], shift_ns)
    replay = RunReplay(timings, topology, {})
    assert replay.speedup(ranks=[slow]) == pytest.approx(seconds.mean() / healthy.mean(), rel=0.01)
    assert replay.analysis is not None
    assert replay.analysis.original_seconds == pytest.approx(seconds.mean(), rel=1e-3)


def test_rank_without_records_counts_as_fast_as_its_peers() -> None:
    timings, seconds = PlayedRun(ALL_AXES, slow={5: 1.4}).play()
    _, healthy = PlayedRun(ALL_AXES).play()
    replay = RunReplay([without_ranks(timing, 6) for timing in timings], ALL_AXES, {})
    assert replay.speedup(ranks=[5]) == pytest.approx(seconds.mean() / healthy.mean(), rel=0.02)


def test_steps_without_a_whole_stage_cannot_be_replayed() -> None:
    timings, _ = PlayedRun(PIPELINE).play()
    replay = RunReplay([without_ranks(timing, 2, 3) for timing in timings], PIPELINE, {})
    assert replay.slowdown() is None
    assert replay.speedup(ranks=[5]) is None
    assert replay.fixes() == []


def test_empty_steps_cannot_be_replayed() -> None:
    assert RunReplay([], PIPELINE, {}).slowdown() is None
    timings, _ = PlayedRun(PIPELINE).play()
    empty = [
        replace(
            timing,
            compute=rows_of(timing.compute, slice(0, 0)),
            transfers=rows_of(timing.transfers, slice(0, 0)),
            ranks=rows_of(timing.ranks, slice(0, 0)),
        )
        for timing in timings
    ]
    assert RunReplay(empty, PIPELINE, {}).speedup(stages=[1]) is None


def test_ranks_stages_and_links_that_do_not_exist_gain_nothing() -> None:
    replay, _ = measured(PIPELINE)
    speedup = replay.speedup(
        ranks=[-1, 99], stages=[7], links=[(0, 99), (0, 0)], excess_seconds={99: 1.0, 0: -1.0}
    )
    assert speedup == 1.0


def test_loop_without_microbatches_is_replayed_from_its_self_times() -> None:
    topology = Topology(dp=4)
    timings, _ = PlayedRun(topology, microbatches=1, slow={2: 1.5}).play()
    without_compute = []
    for timing in timings:
        own = np.zeros(4)
        np.add.at(own, timing.compute.rank, timing.compute.self_seconds)
        without_compute.append(
            replace(
                timing,
                ranks=replace(timing.ranks, compute_seconds=own),
                compute=rows_of(timing.compute, slice(0, 0)),
            )
        )
    gain = RunReplay(without_compute, topology, {}).speedup(ranks=[2])
    whole = RunReplay(timings, topology, {}).speedup(ranks=[2])
    assert whole is not None
    assert gain == pytest.approx(whole, rel=0.01)


def test_unrecorded_transfers_still_count_as_dependencies() -> None:
    timings, seconds = PlayedRun(PIPELINE, slow={6: 1.4}).play()
    _, healthy = PlayedRun(PIPELINE).play()
    without_transfers = [
        replace(timing, transfers=rows_of(timing.transfers, slice(0, 0))) for timing in timings
    ]
    gain = RunReplay(without_transfers, PIPELINE, {}).speedup(ranks=[6])
    assert gain == pytest.approx(seconds.mean() / healthy.mean(), rel=0.02)


def test_microbatches_without_numbers_are_numbered_in_order() -> None:
    timings, _ = PlayedRun(PIPELINE, slow={6: 1.4}).play()
    without_numbers = [
        replace(
            timing,
            compute=replace(timing.compute, microbatch=timing.compute.microbatch * 0 - 1),
            transfers=replace(timing.transfers, microbatch=timing.transfers.microbatch * 0 - 1),
        )
        for timing in timings
    ]
    expected = RunReplay(timings, PIPELINE, {}).speedup(ranks=[6])
    assert expected is not None
    assert RunReplay(without_numbers, PIPELINE, {}).speedup(ranks=[6]) == pytest.approx(
        expected, rel=1e-6
    )


def coupled(timing: StepTiming) -> StepTiming:
    """Let dp ranks wait for the slowest one in every operation, as with sharded parameters."""
    compute = timing.compute
    end_ns = compute.end_ns.copy()
    start_ns = compute.start_ns.copy()
    clock = int(compute.start_ns.min())
    for microbatch in np.unique(compute.microbatch):
        for op in (1, 2):
            selected = (compute.microbatch == microbatch) & (compute.op == op)
            start_ns[selected] = clock
            clock += int(compute.self_seconds[selected].max() * 1e9)
            end_ns[selected] = clock
    rows = np.arange(1, 33)
    collectives = CollectiveTimes(
        group=rows * 0 + 1,
        op=rows * 0 + 17,
        sequence=rows,
        bytes=rows,
        participants=rows * 0 + 4,
        last_rank=rows * 0,
        transfer_seconds=rows * 0.0,
        spread_seconds=rows * 0.0,
    )
    length = clock - int(timing.ranks.start_ns.min())
    return replace(
        timing,
        compute=replace(compute, start_ns=start_ns, end_ns=end_ns),
        ranks=replace(
            timing.ranks,
            end_ns=timing.ranks.start_ns + length,
            step_seconds=timing.ranks.step_seconds * 0 + length / 1e9,
            optimizer_seconds=timing.ranks.optimizer_seconds * 0,
        ),
        collectives=collectives,
    )


def test_prediction_holds_if_dp_ranks_synchronize_in_every_operation() -> None:
    """The wait of a healthy rank for the slow one inside an operation is not its own work."""
    topology = Topology(dp=4)
    timings, _ = PlayedRun(topology, jitter=0.05, slow={2: 1.5}).play()
    healthy, _ = PlayedRun(topology, jitter=0.05).play()
    joined = [coupled(timing) for timing in timings]
    true = sum(t.ranks.step_seconds[0] for t in joined) / sum(
        coupled(timing).ranks.step_seconds[0] for timing in healthy
    )
    assert true > 1.3
    assert RunReplay(joined, topology, {}).speedup(ranks=[2]) == pytest.approx(true, rel=0.03)


def reduced_in_backward(timing: StepTiming) -> StepTiming:
    """Let the last backward end with the reduction, as with DistributedDataParallel."""
    compute = timing.compute
    end_ns = compute.end_ns.copy()
    last = (compute.microbatch == compute.microbatch.max()) & (compute.op == Op.BACKWARD)
    end_ns[last] = end_ns[last].max() + int(REDUCTION_SECONDS * 1e9)
    return replace(timing, compute=replace(compute, end_ns=end_ns))


def test_prediction_holds_if_the_last_backward_contains_the_reduction() -> None:
    run = PlayedRun(DATA_PARALLEL, jitter=0.02, microbatches=2, slow={2: 1.5})
    timings, seconds = run.play()
    _, healthy = PlayedRun(DATA_PARALLEL, jitter=0.02, microbatches=2).play()
    replay = RunReplay([reduced_in_backward(timing) for timing in timings], DATA_PARALLEL, {})
    true = float(seconds.mean() / healthy.mean())
    assert true > 1.3
    assert replay.speedup(ranks=[2]) == pytest.approx(true, rel=0.03)


@pytest.mark.parametrize("kind", ["compute_seconds", "host_seconds"])
def test_prediction_includes_a_ranks_own_time_after_its_compute(kind: str) -> None:
    """A script that reduces its gradients itself, and sleeps before that on one rank."""

    def play(late: float) -> tuple[list[StepTiming], float]:
        run = PlayedRun(DATA_PARALLEL, jitter=0.02, microbatches=2)
        timings, seconds = run.play()
        late_ns = int(late * 1e9)
        for index, timing in enumerate(timings):
            ranks = timing.ranks
            compute = np.bincount(timing.compute.rank, timing.compute.self_seconds)
            own = {"compute_seconds": compute, "host_seconds": ranks.optimizer_seconds}
            own[kind] = own[kind] + late * (ranks.rank == 2)
            timings[index] = replace(
                timing,
                ranks=replace(
                    ranks,
                    **own,
                    end_ns=ranks.end_ns + late_ns,
                    step_seconds=ranks.step_seconds + late,
                ),
            )
        return timings, float(seconds.mean()) + late

    timings, seconds = play(0.06)
    _, healthy = play(0.0)
    replay = RunReplay(timings, DATA_PARALLEL, {})
    assert replay.analysis is not None
    assert replay.analysis.original_seconds == pytest.approx(seconds, rel=0.01)
    assert replay.speedup(ranks=[2]) == pytest.approx(seconds / healthy, rel=0.03)
    assert replay.speedup(ranks=[0]) == pytest.approx(1.0, abs=0.015)


def test_simulated_timings_have_the_fields_of_the_step_model() -> None:
    timings, _ = PlayedRun(ALL_AXES).play()
    for table in (timings[0].compute, timings[0].transfers, timings[0].collectives):
        assert isinstance(table, ComputeTimes | TransferTimes | CollectiveTimes)
        assert len({getattr(table, field.name).size for field in fields(table)}) == 1


def corrupted(table: Any, chance: np.random.Generator) -> Any:
    changed = {}
    for field in fields(table):
        column = getattr(table, field.name).copy()
        if column.size and chance.random() < 0.2:
            hit = chance.random(column.size) < chance.choice([0.02, 0.3, 1.0])
            garbage = (
                np.array([np.nan, -1.0, 1e9, 0.0, np.inf])
                if column.dtype.kind == "f"
                else np.array([-1, 0, 5, 1 << 40, -(1 << 40), 1 << 62])
            )
            column[hit] = chance.choice(garbage, size=int(hit.sum()))
        changed[field.name] = column
    return replace(table, **changed)


@pytest.mark.parametrize("seed", range(20))
def test_corrupted_records_give_finite_or_unknown_results(seed: int) -> None:
    chance = np.random.default_rng(seed)
    timings, _ = PlayedRun(ALL_AXES, steps=2, microbatches=2).play()
    changed = [
        replace(
            timing,
            compute=corrupted(timing.compute, chance),
            transfers=corrupted(timing.transfers, chance),
            ranks=corrupted(timing.ranks, chance),
            collectives=corrupted(timing.collectives, chance),
        )
        for timing in timings
    ]
    replay = RunReplay(changed, ALL_AXES, {"stage_layers": "x,-1"})
    for result in (
        replay.slowdown(),
        replay.speedup(ranks=[0], stages=[0], links=[(0, 4)], excess_seconds={1: 1e9}),
    ):
        assert result is None or np.isfinite(result)
    replay.fixes()
    replay.actions()


def test_replay_returns_the_executed_schedule() -> None:
    replay, _ = measured(PIPELINE, schedule="zero_bubble")
    assert replay.actions() == actions("zero_bubble", 4, 8)


def test_a_worker_names_its_own_ranks_in_any_layout() -> None:
    topology = Topology(dp=2, tp=2, layout=("pp", "tp", "dp", "cp", "ep"))
    replay, _ = measured(topology, slow={0: 1.5, 2: 1.5})
    assert "ranks 0, 2" in [fix.target for fix in replay.fixes()]
