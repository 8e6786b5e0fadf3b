"""Slow links: found from transfer times once both ends are ready, and named."""

import dataclasses

import numpy as np
import pytest
from timed_run import T0, Noise, TimedRun

from paceline_server.detect.finding import Finding
from paceline_server.detect.slow_link.detector import SlowLinkDetector, _FamilyMonitor
from paceline_server.detect.slow_link.traffic import MOST_FAMILIES, TransferBaselines, TransferLane
from paceline_server.steps.timing import CollectiveTimes, TransferTimes
from paceline_wire.batch import Sample
from paceline_wire.metric_names import (
    PRESSURE_CPU_WAITING_SECONDS_TOTAL as CPU_PRESSURE,
)
from paceline_wire.metric_names import (
    RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL as RUN_QUEUE_WAIT,
)
from paceline_wire.metric_names import (
    RANK_TCP_SENDING_SECONDS_TOTAL as SENDING_SECONDS,
)
from paceline_wire.metric_names import (
    RANK_TCP_SENT_BYTES_TOTAL as SENT_BYTES,
)
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

PIPELINE = Topology(2, 4, 2)


def watched(topology: Topology, seed: int, **settings: object) -> TimedRun:
    return TimedRun(topology, seed, **settings).watch(SlowLinkDetector)


def both_ways(link: tuple[int, int], factor: float) -> dict[tuple[int, int], float]:
    return {link: factor, link[::-1]: factor}


def named(findings: list[Finding]) -> list[tuple[tuple[int, int] | None, str | None, bool]]:
    return [(one.link, one.node, one.cleared) for one in findings]


@pytest.mark.parametrize("topology", [PIPELINE, Topology(1, 2, 1), Topology(8, 1, 1)])
def test_jitter_of_transfers_makes_no_slow_link(topology):
    run = watched(topology, 1, noise=Noise(transfer=0.3))
    assert run.advance(120) == []


def test_links_that_always_differ_are_no_fault():
    run = watched(PIPELINE, 2)
    run.slow_links = both_ways((2, 6), 8.0)
    assert run.advance(100) == []


def test_the_network_between_two_nodes_is_named_if_all_links_over_it_are_slow():
    """Compared with each other, none of the links is slower."""
    run = watched(Topology(4, 2, 1), 5, ranks_per_node=4)
    assert run.advance(60) == []
    run.slow_links = dict.fromkeys(run.links(), 40.0)
    [found] = run.advance(6)
    assert (found.link, found.node, found.ranks) == (None, None, list(range(8)))
    assert found.summary.startswith("The network between node-0 and node-1 has been")
    assert found.onset_step == pytest.approx(60, abs=1)
    run.slow_links = {}
    assert named(run.advance(12)) == [(None, None, True)]


@pytest.mark.parametrize("factor", [12.0, 60.0])
@pytest.mark.parametrize("topology", [PIPELINE, Topology(1, 2, 1)])
def test_a_slow_link_is_found_within_five_steps_and_named(topology, factor):
    run = watched(topology, 3, ranks_per_node=1)
    run.advance(40)
    link = run.links()[0]
    run.slow_links = both_ways(link, factor)
    [found] = run.advance(5)
    assert (found.link, found.ranks, found.persistence) == (link, list(link), "persistent")
    assert abs(found.onset_step - 40) <= 1
    assert found.slowdown == pytest.approx(factor, rel=0.15)
    assert found.cause == "unknown"
    assert run.advance(40) == []
    run.slow_links = {}
    assert named(run.advance(10)) == [(link, None, True)]
    run.slow_links = both_ways(link, factor)
    assert [one.link for one in run.advance(5)] == [link]


def test_a_link_that_may_be_well_again_is_not_reported_as_faster_than_before(monkeypatch):
    run = watched(Topology(1, 2, 1), 3, ranks_per_node=1)
    run.advance(40)
    run.slow_links = both_ways(run.links()[0], 12.0)
    assert len(run.advance(5)) == 1
    # As of the newest steps, which scatter too widely to show that it is over.
    monkeypatch.setattr(_FamilyMonitor, "slowdown", lambda *_: 0.4)
    assert run.advance(20) == []


@pytest.mark.parametrize(("factor", "severity"), [(4.0, "info"), (60.0, "warning")])
def test_a_slow_link_that_costs_little_is_no_warning(factor, severity):
    run = watched(PIPELINE, 3, ranks_per_node=1)
    run.advance(40)
    run.slow_links = both_ways(run.links()[0], factor)
    [found] = run.advance(5)
    assert found.severity == severity
    assert (found.cost_ratio < 0.05) == (severity == "info")


@pytest.mark.parametrize("share", [0.0, 0.95])
def test_transfers_of_ranks_that_wait_for_a_cpu_are_not_judged(share):
    run = watched(PIPELINE, 3, ranks_per_node=1)
    for second in range(120):
        for rank in range(PIPELINE.world_size):
            labels = {"job": "job", "rank": str(rank)}
            waited = Sample(RUN_QUEUE_WAIT, labels, share * second, T0 + second * 10**9)
            run.telemetry.add(f"node-{rank}", waited)
    run.advance(40)
    run.slow_links = both_ways(run.links()[0], 12.0)
    assert bool(run.advance(40)) == (share == 0.0)


def test_transfers_that_wait_for_a_cpu_of_a_busy_host_are_no_warning():
    """All ranks wait for a CPU for 12% of the time, later two of them for 80%."""
    run = watched(PIPELINE, 3, ranks_per_node=1)
    link, found = run.links()[0], []
    for step in range(60):
        if step == 40:
            run.slow_links = both_ways(link, 14.0)
        for rank in range(PIPELINE.world_size):
            later = 0.8 if rank in link else 0.12
            seconds = 0.6 * (0.12 * min(step, 40) + later * max(step - 40, 0))
            labels = {"job": "job", "rank": str(rank)}
            waited = Sample(RUN_QUEUE_WAIT, labels, seconds, T0 + step * 600_000_000)
            run.telemetry.add(f"node-{rank}", waited)
        found += run.advance(1)
    assert [(one.cause, one.severity) for one in found] == [("CPU contention", "info")]
    assert found[0].cost_ratio > 0.05


@pytest.mark.parametrize("rises", ["nowhere", "elsewhere", "at one end", "for a while"])
def test_a_cost_that_more_waiting_for_cpus_explains_is_not_judged(rises):
    """Tasks wait for CPUs in 10% of the time, and since the onset in 60%."""
    run = watched(PIPELINE, 3, ranks_per_node=1)
    link, found, waited = run.links()[0], [], dict.fromkeys(range(PIPELINE.world_size), 0.0)
    busy = {"nowhere": None, "elsewhere": 15}.get(rises, link[0])
    until = 60 if rises == "for a while" else 120
    for step in range(120):
        if step == 40:
            run.slow_links = both_ways(link, 12.0)
        for rank in waited:
            waited[rank] += 0.6 * (0.6 if rank == busy and 40 <= step < until else 0.1)
            sample = Sample(CPU_PRESSURE, {}, waited[rank], T0 + step * 600_000_000)
            run.telemetry.add(f"node-{rank}", sample)
        found += run.advance(1)
    assert bool(found) == (rises != "at one end")
    if rises == "for a while":
        assert found[0].step > 60


@pytest.mark.parametrize(("pressure", "is_found"), [(0.1, True), (0.95, False)])
def test_transfers_three_times_as_long_are_not_judged_where_tasks_always_wait_for_cpus(
    pressure, is_found
):
    run = watched(Topology(4, 2, 2), 7, ranks_per_node=4)
    for second in range(120):
        for node in range(4):
            sample = Sample(CPU_PRESSURE, {}, pressure * second, T0 + second * 10**9)
            run.telemetry.add(f"node-{node}", sample)
    run.advance(40)
    run.slow_groups = {0: 2.7}
    assert bool(run.advance(8)) == is_found


@pytest.mark.parametrize(
    ("slowdown", "pressure", "is_found"), [(8.0, 0.0, False), (40.0, 0.0, True), (40.0, 1.0, False)]
)
def test_transfers_that_cost_less_than_tasks_wait_for_cpus_are_not_judged_yet(
    slowdown, pressure, is_found
):
    """All ranks wait for CPUs for 45% of the time; the transfers cost 12% or 65%."""
    run = watched(Topology(4, 2, 2), 7, ranks_per_node=4)
    for second in range(120):
        at_ns = T0 + second * 10**9
        for rank, node in run.generation.nodes.items():
            labels = {"job": "job", "rank": str(rank)}
            run.telemetry.add(node, Sample(RUN_QUEUE_WAIT, labels, 0.45 * second, at_ns))
        for node in set(run.generation.nodes.values()):
            run.telemetry.add(node, Sample(CPU_PRESSURE, {}, pressure * second, at_ns))
    run.advance(40)
    run.slow_groups = {0: slowdown}
    assert bool(run.advance(12)) == is_found


@pytest.mark.parametrize(("busy", "is_found"), [(1, True), (4, False)])
def test_one_busy_node_of_several_does_not_explain_slow_transfers(busy, is_found):
    run = watched(Topology(4, 2, 2), 7, ranks_per_node=2)
    for second in range(120):
        for node in range(8):
            waited = 0.5 * second if node < busy else 0.0
            sample = Sample(CPU_PRESSURE, {}, waited, T0 + second * 10**9)
            run.telemetry.add(f"node-{node}", sample)
    run.advance(40)
    run.slow_groups = {0: 8.0}
    assert bool(run.advance(8)) == is_found


def count_waits_and_bytes(
    run: TimedRun, step: int, share: float, sending: float, sent: float | None = None
) -> None:
    """Ranks wait for CPUs in this share of the time; they have sent for `sending` s, 10 MB/s or
    `sent` bytes."""
    at_ns, second = T0 + step * 600_000_000, 0.6 * step
    for rank, node in run.generation.nodes.items():
        labels = {"job": "job", "rank": str(rank)}
        for name, value in (
            (RUN_QUEUE_WAIT, share * second),
            (SENT_BYTES, 1e7 * second if sent is None else sent),
            (SENDING_SECONDS, sending),
        ):
            run.telemetry.add(node, Sample(name, labels, value, at_ns))


@pytest.mark.parametrize(
    ("share", "delivery", "steps", "is_found"),
    [
        pytest.param(0.3, 1.3, 40, False, id="delivered as before"),
        pytest.param(0.3, 8.0, 40, True, id="delivered slowly"),
        pytest.param(0.3, 8.0, 10, False, id="for six seconds"),
        pytest.param(0.5, 8.0, 36, False, id="for 22 seconds of long waits for CPUs"),
        pytest.param(0.02, 1.0, 40, True, id="host not busy"),
    ],
)
def test_transfers_on_a_busy_host_are_judged_by_what_tcp_delivers(share, delivery, steps, is_found):
    run = watched(PIPELINE, 3, ranks_per_node=1)
    sending = 0.0
    for step in range(80):
        is_slow = 40 <= step < 40 + steps
        run.slow_links = both_ways(run.links()[0], 12.0) if is_slow else {}
        sending += 0.6 * 0.1 * (delivery if is_slow else 1.0)
        count_waits_and_bytes(run, step, share, sending)
        run.advance(1)
    assert bool(run.findings) == is_found


def test_what_waits_at_both_ends_cannot_explain_needs_no_delivery():
    """TCP is not slower: the time is lost elsewhere, such as in the transport above it."""
    run = watched(PIPELINE, 3, ranks_per_node=1)
    for step in range(50):
        run.slow_links = both_ways(run.links()[0], 30.0) if step >= 40 else {}
        count_waits_and_bytes(run, step, 0.11, 0.06 * step)
        run.advance(1)
    assert [one.link for one in run.findings] == [run.links()[0]]


def test_small_messages_that_take_longer_per_byte_are_no_slow_network():
    """A busy host makes transfers longer, just when the ranks send little, as in an evaluation."""
    run = watched(PIPELINE, 3, ranks_per_node=1)
    sending = sent = 0.0
    for step in range(80):
        if step == 40:
            run.slow_links = both_ways(run.links()[0], 12.0)
        sending += 0.6 * (0.02 if step >= 40 else 0.1)
        sent += 0.6 * (2e4 if step >= 40 else 1e7)
        count_waits_and_bytes(run, step, 0.3, sending, sent)
        run.advance(1)
    assert run.findings == []


@pytest.mark.parametrize(("delivery", "is_found"), [(1.0, False), (10.0, True)])
def test_transfers_that_vary_widely_are_judged_if_tcp_delivers_more_slowly_too(delivery, is_found):
    """On a busy host, transfers of some steps in a row take several times as long as others."""
    run = watched(Topology(1, 2, 1), 3, ranks_per_node=1)
    link, chance, sending = run.links()[0], np.random.default_rng(3), 0.0
    for step in range(140):
        if step % 16 == 0:
            usual = float(np.exp(chance.normal(3.0, 0.8)))
        is_slow = step >= 120
        run.slow_links = both_ways(link, usual * (8.0 if is_slow else 1.0))
        sending += 0.6 * 0.1 * (delivery if is_slow else 1.0)
        count_waits_and_bytes(run, step, 0.4, sending)
        run.advance(1)
    assert bool(run.findings) == is_found
    assert {one.onset_step for one in run.findings} <= {119, 120, 121}


def test_a_link_slow_in_one_direction_is_found():
    run = watched(PIPELINE, 4, ranks_per_node=1)
    run.advance(40)
    run.slow_links = {(6, 2): 30.0}
    assert [one.link for one in run.advance(5)] == [(2, 6)]


def test_two_slow_links_that_share_nothing_are_two_findings():
    run = watched(Topology(4, 4, 1), 5, ranks_per_node=1)
    run.advance(40)
    run.slow_links = both_ways((0, 4), 20.0) | both_ways((9, 13), 40.0)
    assert sorted(one.link for one in run.advance(6)) == [(0, 4), (9, 13)]


def test_all_links_of_a_node_are_one_finding_that_names_it():
    run = watched(Topology(4, 4, 1), 6, ranks_per_node=4)
    run.advance(40)
    run.slow_links = {
        link: 20.0 for link in run.links() if 4 <= min(link) < 8 or 4 <= max(link) < 8
    }
    [found] = run.advance(20)
    assert (found.link, found.node, found.ranks) == (None, "node-1", [4, 5, 6, 7])


def test_slow_groups_are_intersected():
    """Two reductions cross one node, and two do not."""
    run = watched(Topology(4, 2, 2), 7, ranks_per_node=4)
    run.advance(40)
    run.slow_groups = {0: 8.0}
    [found] = run.advance(20)
    assert (found.link, found.node) == (None, None)
    assert found.ranks == [0, 2, 4, 6]
    assert "The all_reduce of ranks 0, 2, 4, 6" in found.summary


def test_a_network_that_is_slow_everywhere_has_no_slow_link():
    run = watched(Topology(4, 4, 1), 8, ranks_per_node=1)
    run.advance(40)
    run.slow_links = dict.fromkeys(run.links(), 20.0)
    assert run.advance(40) == []


def test_a_link_that_is_slower_and_costs_nothing_is_no_finding():
    run = watched(PIPELINE, 9, ranks_per_node=1)
    run.advance(40)
    run.slow_links = both_ways((2, 6), 1.3)
    assert run.advance(60) == []


@pytest.mark.parametrize(("every", "steps"), [(1, 5), (3, 13)])
def test_a_group_that_is_first_seen_late_is_watched_from_then_on(every, steps):
    run = watched(Topology(4, 2, 2), 10)
    run.late_from, run.late_every = 20, every
    run.advance(20 + 20 * every)
    run.slow_late_groups = {1: 20.0}
    [found] = run.advance(steps)
    assert found.ranks == [1, 3, 5, 7]
    assert "The all_gather of ranks 1, 3, 5, 7" in found.summary
    assert found.onset_step == 20 + 20 * every
    # A rare transfer rarely has a cost, which counts as a share of all steps.
    assert found.cost_ratio == pytest.approx(19 * 0.01 / 0.6 / every, rel=0.2)
    run.slow_late_groups = {}
    assert named(run.advance(10 * every)) == [(None, found.node, True)]


def test_a_transfer_of_short_steps_costs_a_share_of_all_steps():
    run = watched(Topology(4, 2, 2), 10)
    run.late_from, run.late_every = 20, 3

    def advance(steps: int) -> list[Finding]:
        found = []
        for _ in range(steps):
            is_short = run.step >= 20 and (run.step - 20) % 3 == 0
            run.slow = dict.fromkeys(range(16), 0.1 if is_short else 1.0)
            found += run.advance(1)
        return found

    advance(80)
    run.slow_late_groups = {1: 20.0}
    [found] = advance(30)
    assert found.cost_ratio == pytest.approx(19 * 0.01 / 0.6 / 3, rel=0.2)


def test_groups_that_are_first_seen_late_are_healthy():
    run = watched(Topology(4, 2, 2), 11)
    run.late_from, run.late_every = 30, 2
    assert run.advance(150) == []


def test_a_second_collective_in_some_steps_makes_the_others_no_slower():
    """A script averages its loss over the ranks every 16 steps, in the group of the gradients."""
    traffic, run = TransferBaselines(), TimedRun(Topology(8, 1, 1), 12)
    seen = []
    for step in range(80):
        timing = run.timing()
        one = timing.collectives
        assert one.group.size == 1
        if step % 16 == 15:
            columns = {name: getattr(one, name) for name in CollectiveTimes.__dataclass_fields__}
            two = {name: np.repeat(column, 2) for name, column in columns.items()}
            timing = dataclasses.replace(timing, collectives=CollectiveTimes(**two))
        for [seconds] in traffic.seconds(timing):
            seen.append(seconds / one.transfer_seconds[0])
        run.step += 1
    assert seen == pytest.approx([2.0 if n % 16 == 15 else 1.0 for n in range(80 - len(seen), 80)])


def test_a_lost_span_is_as_long_as_the_others_of_its_lane():
    traffic, run = TransferBaselines(), TimedRun(Topology(8, 1, 1), 12)
    for step in range(40):
        timing = run.timing()
        columns = {
            name: np.repeat(getattr(timing.collectives, name), 2 if step % 5 == 2 else 4)
            for name in CollectiveTimes.__dataclass_fields__
        }
        timing = dataclasses.replace(timing, collectives=CollectiveTimes(**columns))
        for [seconds] in traffic.seconds(timing):
            assert seconds == pytest.approx(4 * columns["transfer_seconds"][0])
        run.step += 1


def test_irregular_transfers_are_not_watched_forever():
    traffic, run = TransferBaselines(), TimedRun(Topology(16, 1, 1), 12)
    for _ in range(200):
        timing = run.timing()
        pair = np.sort(run.chance.choice(16, 2, replace=False))
        one = {"source": pair[:1], "destination": pair[1:]}
        rest = {
            name: np.zeros(1, dtype=np.int64)
            for name in TransferTimes.__dataclass_fields__
            if name not in one
        }
        traffic.seconds(dataclasses.replace(timing, transfers=TransferTimes(**one, **rest)))
        run.step += 1
    assert len(traffic.families) <= MOST_FAMILIES
    assert traffic.families[0].lanes == [TransferLane(tuple(range(16)), int(Op.ALL_REDUCE))]


@pytest.mark.parametrize("is_in_steps", [True, False])
def test_waits_for_a_rank_without_steps_are_no_slow_link(is_in_steps):
    """A rank that only generates samples is late for the broadcast of these."""
    run, found = watched(Topology(4, 1, 1), 5), []
    [detector] = run._detectors
    for step in range(120):
        run.step = step
        timing = run.timing()
        collectives, ranks = timing.collectives, timing.ranks
        slower = 5.0 if step >= 60 else 1.0
        taken = np.full(collectives.group.size, slower * 0.05 * ranks.step_seconds.mean())
        columns = {field.name: getattr(ranks, field.name) for field in dataclasses.fields(ranks)}
        timing = dataclasses.replace(
            timing,
            ranks=ranks
            if is_in_steps
            else dataclasses.replace(ranks, **{key: rows[:-1] for key, rows in columns.items()}),
            collectives=dataclasses.replace(
                collectives,
                participants=np.full(collectives.group.size, 4 if is_in_steps else 3),
                transfer_seconds=taken,
            ),
        )
        found += detector.update(run.observe(timing))
    assert bool(found) == is_in_steps
