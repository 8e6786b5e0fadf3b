"""The engine as the worker uses it: batches in any order, then steps and findings."""

import random
from functools import partial

import msgspec
import pytest
from simulated_job import JOB, START_NS, TP, SimulatedJob

from paceline_server.engine.clocks import NodeClocks
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Outcome
from paceline_server.policy import Policy
from paceline_server.steps.types import RankStep, StepSummary
from paceline_wire.batch import RankAttached
from paceline_wire.ring import Frame, Identity, section_op
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

PARTS = (
    "compute_seconds",
    "communication_seconds",
    "bubble_seconds",
    "data_wait_seconds",
    "optimizer_seconds",
    "checkpoint_seconds",
    "gc_seconds",
)


def steps(outcomes: list[Outcome]) -> list[StepSummary]:
    return [summary for outcome in outcomes for summary in outcome.steps]


def parts_of(rank: RankStep) -> float:
    return sum(getattr(rank, part) for part in PARTS)


@pytest.mark.parametrize(("share", "severity"), [(0.015, "warning"), (0.5, "info")])
def test_a_slowdown_that_costs_less_than_the_policy_notes_is_information(share, severity):
    job = SimulatedJob(engine=Engine(JOB, Policy(notable_cost_share=share)))
    job.advance(20)
    job.faults.slow = {5: 1.3}
    job.advance(12)
    [found] = [one for one in job.findings if one.kind == "straggler"][:1]
    assert 0.015 < found.cost_ratio < 0.5
    assert found.severity == severity


@pytest.mark.parametrize(
    ("cost_ratio", "speedup", "severity"),
    [(0.2, 1.25, "critical"), (0.05, None, "warning"), (0.2, 1.05, "warning"), (0.2, 1.01, "info")],
)
def test_severity_is_that_of_what_a_repair_would_gain(cost_ratio, speedup, severity):
    job = SimulatedJob()
    job.advance(20)
    job.faults.slow = {5: 2.0}
    job.advance(12)
    [found] = [one for one in job.findings if one.kind == "straggler"][:1]
    assert job.engine._running is not None
    costs = msgspec.structs.replace(
        found, severity="critical", cost_ratio=cost_ratio, speedup=speedup
    )
    assert job.engine._running._weighed(costs).severity == severity


def test_a_slow_rank_that_another_one_hides_is_no_mere_information():
    job = SimulatedJob(Topology(4, 1, 1))
    job.advance(20)
    job.faults.slow_data = {2: 0.4}
    job.advance(12)
    [first] = [one for one in job.findings if one.kind == "slow_data"]
    assert "fixed as well" not in first.summary
    job.faults.slow = {0: 1.8}
    job.advance(12)
    [hidden] = [one for one in job.findings if one.kind == "straggler"]
    assert (hidden.rank, hidden.severity) == (0, "critical")
    assert hidden.cost_ratio < 0.05
    assert "With rank 2 fixed as well, it gives 1.8" in hidden.summary


def test_ranks_of_one_node_that_become_slow_together_share_a_verdict():
    job = SimulatedJob(Topology(4, 1, 1), ranks_per_node=4)
    job.advance(20)
    job.faults.slow = {1: 1.6, 3: 1.6}
    job.advance(12)
    one, other = [found for found in job.findings if found.kind == "straggler"]
    assert (one.rank, other.rank) == (1, 3)
    assert one.ranks == other.ranks == [1, 3]
    assert one.summary == other.summary
    assert one.summary.startswith("Ranks 1 and 3 (node-0) have been 1.")
    assert "since step 20, cause unknown. Together this costs 3" in one.summary
    assert one.cost_ratio == pytest.approx(1 - 1 / 1.6, abs=0.03)
    assert one.severity == "critical"
    for rank, hidden_by, line in zip((1, 3), (3, 1), one.evidence, strict=False):
        assert line.text.startswith(f"rank {rank}: compute time ")
        assert "of step time alone, and 3" in line.text
        assert line.text.endswith(f" with rank {hidden_by} fixed as well")
    # Each that recovers leaves the verdict of the other.
    job.faults.slow = {3: 1.6}
    job.advance(12)
    [over, last] = [found for found in job.findings if found.kind == "straggler"][2:]
    assert (over.rank, over.cleared) == (1, True)
    assert (last.rank, last.ranks) == (3, [])
    assert last.summary.startswith("Rank 3 (node-0) has been 1.")


def test_ranks_of_two_nodes_that_become_slow_together_name_each_other():
    job = SimulatedJob(Topology(4, 1, 1))
    job.advance(20)
    job.faults.slow = {1: 1.6, 3: 1.6}
    job.advance(12)
    one, other = [found for found in job.findings if found.kind == "straggler"]
    assert "With rank 3 fixed as well, it gives 1." in one.summary
    assert "With rank 1 fixed as well, it gives 1." in other.summary
    assert one.severity == other.severity == "critical"


def test_a_step_comes_out_with_all_its_parts():
    job = SimulatedJob(jitter=0.0)
    summary = steps(job.advance(2))[0]
    assert (summary.step, summary.generation, len(summary.ranks)) == (0, 0, 8)
    # 9 slots of 60 ms, collectives and transfers, the reduction and the optimizer.
    assert summary.duration_seconds == pytest.approx(0.565, rel=0.03)
    for rank in summary.ranks:
        assert rank.self_seconds == pytest.approx(0.48, rel=0.01)
        assert rank.slowdown == pytest.approx(1.0, abs=0.01)
        assert parts_of(rank) == pytest.approx(rank.step_seconds, rel=0.01)


def test_the_ledger_sums_to_the_wall_time():
    job = SimulatedJob(seed=1)
    ledger = job.advance(20)[-1].ledger
    names = [name for name in ledger.__struct_fields__ if name.endswith("_seconds")]
    total = sum(getattr(ledger, name) for name in names if name != "wall_seconds")
    assert total == pytest.approx(ledger.wall_seconds, abs=1e-6)
    assert ledger.useful_steps == 20
    assert ledger.goodput_ratio > 0.9


def attached(job: SimulatedJob, rank: int) -> RankAttached:
    identity = Identity(
        job=JOB,
        generation=0,
        rank=rank,
        local_rank=rank,
        world_size=8,
        topology=job.topology,
        coordinates=job.topology.coordinates(rank),
        pid=4000 + rank,
        host="here",
        clock_offset_ns=0,
        started_ns=1,
    )
    return RankAttached(time_ns=job.batch(job.node(rank)).packed_ns, identity=identity)


def found(job: SimulatedJob, found_ns: int) -> None:
    """Replace the engine with one of a server that finds the running job at `found_ns`."""
    job.engine = Engine(JOB)
    job.engine.place(msgspec.structs.replace(job.placement(), started_ns=found_ns, was_found=True))


def test_the_ledger_of_a_job_found_after_its_end_covers_its_own_time():
    """The job ran and ended while the server was down.

    Afterwards it receives all batches at once.
    """
    job = SimulatedJob(jitter=0.0)
    found_ns = START_NS + 600 * 10**9
    found(job, found_ns)
    for node in job.nodes:  # live batches overtake the backlog
        for _ in range(4):
            live = msgspec.structs.replace(job.batch(node), packed_ns=found_ns)
            job.engine.feed(live, found_ns)
    for rank in job.ranks:
        reported = job.batch(job.node(rank), events=[attached(job, rank)])
        job.engine.feed(reported, found_ns)
    job.now_ns += 3 * 10**9
    for _ in range(20):
        for batch in job.batches(job.play()):
            job.engine.feed(batch, found_ns)
    assert job.tick(found_ns).ended_ns is None
    for rank in job.ranks:
        job.exit(rank, exit_code=0, received_ns=found_ns)
    outcome = job.tick(found_ns + 10**10)
    assert outcome.ended_ns == job.now_ns
    assert outcome.ledger.wall_seconds > 500, "while it is not known to be over"
    ledger = job.engine.ledger(outcome.ended_ns)
    assert ledger.wall_seconds == pytest.approx((job.now_ns - START_NS) / 1e9)
    assert ledger.startup_seconds == pytest.approx(3, rel=0.01)
    assert ledger.useful_steps == 20


@pytest.mark.parametrize("skew_seconds", [-3600, 3600])
def test_a_wrong_clock_does_not_change_the_age_of_a_job(skew_seconds: int):
    job = SimulatedJob(jitter=0.0)
    job.faults.skew_ns = dict.fromkeys(job.nodes, skew_seconds * 10**9)
    found_ns = START_NS + 10**9
    found(job, found_ns)
    job.now_ns += 10**9
    for rank in job.ranks:
        job.engine.feed(job.batch(job.node(rank), events=[attached(job, rank)]), found_ns)
    job.tick(found_ns)
    job.advance(20)
    for rank in job.ranks:
        job.exit(rank, exit_code=0)
    outcome = job.tick(job.now_ns)
    assert outcome.ended_ns == job.now_ns
    assert outcome.ledger.wall_seconds == pytest.approx((job.now_ns - found_ns) / 1e9)


def test_batches_twice_and_out_of_order_give_the_same_steps():
    plain, mixed = SimulatedJob(seed=3), SimulatedJob(seed=3)
    expected = steps(plain.advance(12))
    chance = random.Random(1)
    found = []
    for _ in range(6):
        batches = [*mixed.batches(mixed.play()), *mixed.batches(mixed.play())]
        batches += chance.sample(batches, 3)
        chance.shuffle(batches)
        for batch in batches:
            mixed.engine.feed(batch, mixed.now_ns)
        found += mixed.tick(mixed.now_ns).steps
    found += mixed.tick(mixed.now_ns + 10**10).steps
    assert [each.step for each in found] == [each.step for each in expected]
    assert [each.ranks for each in found] == [each.ranks for each in expected]


def test_events_of_another_job_generation_node_or_rank_are_ignored():
    job = SimulatedJob(seed=1)
    job.advance(3)
    rows = job.play()
    for batch in list(job.batches(rows)):
        blocks = batch.spans
        for changed in (
            [msgspec.structs.replace(block, job="other") for block in blocks],
            [msgspec.structs.replace(block, generation=1) for block in blocks],
            [msgspec.structs.replace(block, rank=block.rank + 8) for block in blocks],
        ):
            job.engine.feed(msgspec.structs.replace(batch, spans=changed, events=[]), job.now_ns)
        foreign_batch = msgspec.structs.replace(batch, agent_id="node-9", events=[])
        job.engine.feed(foreign_batch, job.now_ns)
    assert job.tick(job.now_ns + 10**10).steps == []


def test_groups_that_were_never_defined_cost_only_the_waits():
    job = SimulatedJob(seed=1)
    job._defined = True
    summary = steps(job.advance(2))[0]
    assert max(rank.wait_seconds for rank in summary.ranks) < 1e-4
    assert all(rank.self_seconds > 0.4 for rank in summary.ranks)


def test_lost_spans_leave_the_step_without_the_rank():
    job = SimulatedJob(seed=1)
    job.advance(2)
    rows = job.play()
    rows[3] = [row for row in rows[3] if row[1] & 0xFFFF != Op.STEP]
    job.deliver(rows)
    job.advance(3)
    by_step = {summary.step: summary for summary in steps(job.outcomes)}
    assert sorted(by_step) == [0, 1, 2, 3, 4, 5]
    assert [rank.rank for rank in by_step[2].ranks] == [0, 1, 2, 4, 5, 6, 7]
    assert job.findings == []


def test_a_rank_that_claims_a_day_per_span_changes_nothing_for_the_others():
    job = SimulatedJob(seed=1)
    job.advance(3)
    for _ in range(10):
        rows = job.play()
        rows[3] = [(*row[:7], 86_400 * 10**9) for row in rows[3]]
        job.deliver(rows)
    ledger = job.outcomes[-1].ledger
    assert ledger.wall_seconds == pytest.approx((job.now_ns + 10**8 - START_NS) / 1e9)
    assert {finding.rank for finding in job.findings} <= {3, None}


def test_skewed_clocks_are_brought_to_the_servers():
    job = SimulatedJob(seed=1)
    job.faults.skew_ns = {"node-1": 3_600_000_000_000, "node-2": -60_000_000_000}
    summaries = steps(job.advance(20))
    for summary in summaries[-5:]:
        assert summary.duration_seconds == pytest.approx(0.57, abs=0.3)
        # Delivery takes 100 ms here, which limits the accuracy for a node with an unsynchronized
        # clock.
        assert all(rank.self_seconds > 0.4 for rank in summary.ranks)
    assert job.findings == []


def test_small_differences_between_clocks_are_left_to_ntp():
    clocks = NodeClocks()
    for _ in range(10):
        clocks.add_batch("near", 1_000_000_000, 1_050_000_000)
        clocks.add_batch("ahead", 9_000_000_000, 1_000_000_000)
        clocks.add_batch("behind", 1_000_000_000, 90_000_000_000)
    clocks.add_batch("new", 9_000_000_000, 1_000_000_000)
    shifts = [clocks.shift_ns(node) for node in ("near", "ahead", "behind", "new", "unknown")]
    assert shifts == [0, -8_000_000_000, 89_000_000_000, 0, 0]


def test_a_restart_resets_the_state_and_counts_lost_steps():
    job = SimulatedJob(seed=1)
    job.advance(10)
    job.engine.suspend()
    job.now_ns += 5_000_000_000
    job.generation, job.step = 1, 7
    job.place()
    found = steps(job.advance(8))
    assert [(each.generation, each.step) for each in found] == [(1, step) for step in range(7, 15)]
    ledger = job.outcomes[-1].ledger
    assert (ledger.lost_steps, ledger.useful_steps) == (3, 15)
    assert ledger.restart_seconds == pytest.approx(5.0, abs=0.1)
    assert job.outcomes[-1].highest_step == 14


def test_placing_the_same_generation_again_changes_nothing():
    job = SimulatedJob(seed=1)
    job.advance(5)
    job.engine.place(msgspec.structs.replace(job.placement(), started_ns=START_NS))
    assert job.advance()[0].steps[-1].step == 5


def test_a_new_worker_continues_with_the_memory_of_the_old():
    job = SimulatedJob(seed=1)
    before = job.advance(10)[-1].ledger
    job.engine = Engine("job-simulated", memory=job.engine.memory())
    job.place()
    after = job.advance(5)[-1]
    assert after.ledger.useful_steps == before.useful_steps + 5
    assert after.highest_step == 14
    with pytest.raises(msgspec.DecodeError):
        Engine("job", memory=b"malformed")


def test_progress_names_the_operation_in_flight():
    job = SimulatedJob(seed=1)
    job.advance(3)
    since = job.now_ns - job.offset_ns(0)
    frames = {
        0: Frame(Op.ALL_REDUCE, since, TP, None, 118),
        1: Frame(Op.FORWARD_RECV, since, 0, 5, 57),
        2: Frame(section_op(9), since, 0, None, 0),
    }
    states = {rank: job.state(rank, frames=[frame]) for rank, frame in frames.items()}
    progress = job.wait(1.0, states)[-1].progress
    # Ranks without events have no progress.
    assert [(each.rank, each.operation) for each in progress] == [
        (0, "all_reduce tp#118"),
        (1, "forward_recv from 5 #57"),
        (2, "section:9"),
    ]
    assert progress[0].operation_seconds == pytest.approx(1.0)
    assert progress[0].step == 2
    assert job.tick(job.now_ns).progress == []


def test_a_step_waits_briefly_for_its_loss():
    job = SimulatedJob(seed=1)
    assert steps(job.advance(1)) == [] or job.step == 1
    outcomes = job.advance(3)
    reported = steps(job.outcomes)
    assert [each.loss for each in reported[1:]] == [2.0] * len(reported[1:])
    assert len(reported) >= 3
    assert steps([job.tick(job.now_ns + 3 * 10**9)]) or len(reported) == 4
    assert outcomes


def test_before_the_first_placement_outcomes_are_empty():
    engine = Engine("job")
    assert engine.tick(START_NS) == Outcome()


def test_a_straggler_costs_goodput_what_its_repair_would_gain():
    """By hand: 8 microbatches of 20 + 40 ms fill a healthy step of 0.48 s. At half the speed the
    step takes 0.96 s, and the three other ranks wait for the half of it."""
    job = SimulatedJob(Topology(4, 1, 1), jitter=0.0)
    healthy = job.advance(10)[-1].ledger
    assert healthy.goodput_ratio > 0.97
    assert healthy.straggler_seconds == 0.0
    job.faults.slow = {2: 2.0}
    outcome = job.advance(10)[-1]
    ledger, goodput = outcome.ledger, outcome.steps[-1].goodput
    names = [name for name in ledger.__struct_fields__ if name.endswith("_seconds")]
    total = sum(getattr(ledger, name) for name in names if name != "wall_seconds")
    assert total == pytest.approx(ledger.wall_seconds, abs=1e-6)
    assert ledger.straggler_seconds == pytest.approx(10 * 0.48, rel=0.01)
    assert goodput.compute_seconds == pytest.approx(0.48, rel=0.01)
    [found] = [one for one in job.findings if one.kind == "straggler"]
    cost_ratio = goodput.straggler_seconds / outcome.steps[-1].duration_seconds
    assert cost_ratio == pytest.approx(found.cost_ratio, rel=0.01)


def test_a_straggler_without_peers_costs_goodput_what_is_reported():
    """Each stage has one rank, which is compared with its own past only."""
    job = SimulatedJob(Topology(1, 4, 1), jitter=0.0)
    job.advance(20)
    job.faults.slow = {2: 2.0}
    outcome = job.advance(10)[-1]
    [found] = [one for one in job.findings if one.kind == "straggler"]
    last = outcome.steps[-1]
    cost_ratio = last.goodput.straggler_seconds / last.duration_seconds
    assert cost_ratio == pytest.approx(found.cost_ratio, rel=0.05)
    job.faults.slow = {}
    assert job.advance(20)[-1].steps[-1].goodput.straggler_seconds == 0.0


def test_a_rank_with_more_to_do_by_design_is_an_imbalance_and_no_straggler():
    """As above, but rank 0 takes a quarter longer from the first step on: 0.6 s, 0.12 s lost.

    With a straggler at half the speed beside it, 0.36 s more are lost.
    """
    job = SimulatedJob(Topology(4, 1, 1), jitter=0.0)
    job.faults.slow = {0: 1.25}
    ledger = job.advance(60)[-1].ledger
    assert all(found.severity == "info" for found in job.findings)
    assert ledger.straggler_seconds == 0.0
    assert ledger.imbalance_seconds == pytest.approx(60 * 0.12, rel=0.02)
    job.faults.slow = {0: 1.25, 2: 2.0}
    outcome = job.advance(10)[-1]
    goodput = outcome.steps[-1].goodput
    assert goodput.straggler_seconds == pytest.approx(0.36, rel=0.02)
    assert goodput.imbalance_seconds == pytest.approx(0.12, rel=0.02)
    job.faults.slow = {0: 1.25}
    goodput = job.advance(20)[-1].steps[-1].goodput
    assert goodput.straggler_seconds == 0.0
    assert goodput.imbalance_seconds == pytest.approx(0.12, rel=0.02)


def report_saved(job: SimulatedJob, step: int, *, ranks: range) -> Outcome:
    views = {rank: job.state(rank) for rank in ranks}
    states = {
        rank: msgspec.structs.replace(
            state, view=msgspec.structs.replace(state.view, saved_step=step)
        )
        for rank, state in views.items()
    }
    return job.wait(0.5, states)[-1]


def test_checkpoints_have_an_interval_and_a_cost():
    job = SimulatedJob()
    save = partial(report_saved, job)
    first = job.advance(3)[0]
    assert (first.first_step, first.saved_step, first.checkpoint_interval_steps) == (0, None, None)
    assert save(10, ranks=range(8)).checkpoint_interval_steps is None
    partly = save(20, ranks=range(7))
    assert (partly.saved_step, partly.checkpoint_interval_steps) == (10, None)
    complete = save(20, ranks=range(8))
    assert (complete.saved_step, complete.checkpoint_interval_steps) == (20, 10)
    assert save(50, ranks=range(8)).checkpoint_interval_steps == 20


def test_the_steps_until_a_checkpoint_is_complete_are_counted():
    job = SimulatedJob()
    assert job.advance(12)[-1].checkpoint_saving_steps is None
    assert report_saved(job, 10, ranks=range(8)).checkpoint_saving_steps == 2
    job.advance(12)
    assert report_saved(job, 10, ranks=range(8)).checkpoint_saving_steps == 2, "the same one"
    assert report_saved(job, 20, ranks=range(8)).checkpoint_saving_steps == 3, "of 2 and 4"
