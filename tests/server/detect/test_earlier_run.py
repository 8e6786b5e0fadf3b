"""Ranks of a run that the launcher replaced still run: reported once, and cleared."""

from __future__ import annotations

from paceline_server.detect.earlier_run.detector import EarlierRunDetector
from paceline_server.detect.finding import Finding
from paceline_server.detect.observation import EarlierRank, Generation, Observation
from paceline_server.detect.telemetry import Telemetry
from paceline_server.policy import Policy
from paceline_server.steps.groups import Groups
from paceline_wire.topology import Topology

SECOND = 1_000_000_000


def detector() -> EarlierRunDetector:
    generation = Generation(
        job="job",
        number=100,
        topology=Topology(dp=2),
        nodes={0: "node-0", 1: "node-2"},
        gpus={},
        started_ns=0,
    )
    return EarlierRunDetector(generation, Policy())


def show(watching: EarlierRunDetector, second: float, *earlier: EarlierRank) -> list[Finding]:
    return watching.update(
        Observation(
            now_ns=int(second * SECOND),
            steps=[],
            exits=[],
            device_events=[],
            ranks={},
            last_seen_ns={},
            exited={},
            losses={},
            telemetry=Telemetry(),
            groups=Groups(2),
            earlier_ranks=earlier,
        )
    )


def old(second: float) -> EarlierRank:
    return EarlierRank(
        node="node-1", rank=1, generation=0, step=41, received_ns=int(second * SECOND)
    )


def test_an_old_rank_is_reported_once_and_cleared_when_it_ends() -> None:
    watching = detector()
    assert show(watching, 5.0, old(5.0)) == [], "it may be ending"
    (found,) = show(watching, 12.0, old(11.5))
    assert (found.kind, found.severity, found.node, found.ranks) == (
        "earlier_run",
        "critical",
        "node-1",
        [1],
    )
    assert found.summary == (
        "Rank 1 of an earlier run still runs on node-1 beside the current run, and may write to "
        "its checkpoints."
    )
    assert show(watching, 13.0, old(12.5)) == []
    (over,) = show(watching, 30.0, old(12.5))
    assert (over.fingerprint, over.cleared) == (found.fingerprint, True)


def test_a_rank_that_ended_with_its_run_is_no_finding() -> None:
    watching = detector()
    assert show(watching, 30.0, old(1.0)) == []
