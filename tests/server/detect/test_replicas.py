"""Replicas that differ, as ranks report them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline_server.detect.finding import Finding
from paceline_server.detect.observation import Generation
from paceline_server.detect.replicas.detector import ReplicaDetector
from paceline_server.policy import Policy
from paceline_wire.topology import Topology

NODES = {0: "node-0", 1: "node-1", 2: "node-2"}


def reported(text: str | None) -> list[Finding]:
    detector = ReplicaDetector(Generation("job", 1, Topology(3, 1, 1), NODES, {}, 0), Policy())
    metadata = {} if text is None else {"replica_mismatch": text}
    observation = cast(Any, SimpleNamespace(metadata=metadata, now_ns=1))
    found = detector.update(observation)
    assert detector.update(observation) == [], "reported once"
    return found


def mismatch(**changes: Any) -> str:
    values = {
        "step": 64,
        "agreed_step": 56,
        "tensor": "0.weight",
        "ranks": [0, 1, 2],
        "outliers": [1],
    }
    return json.dumps(values | changes)


def test_the_replica_that_differs_and_its_node_are_named() -> None:
    [found] = reported(mismatch())
    assert (found.rank, found.node, found.suspects_node) == (1, "node-1", True)
    assert (found.onset_step, found.step, found.severity) == (57, 64, "critical")
    assert found.summary == (
        "Rank 1 (node-1) has other parameters than its replicas: 0.weight differs after step 64; "
        "they were the same after step 56."
    )


def test_of_two_replicas_none_is_named() -> None:
    [found] = reported(mismatch(ranks=[0, 2], outliers=[], agreed_step=None))
    assert (found.rank, found.suspects_node, found.ranks) == (None, False, [0, 2])
    assert "One of ranks 0 and 2 has wrong parameters" in found.summary
    assert found.onset_step is None


def test_several_outliers_blame_no_node() -> None:
    [found] = reported(mismatch(ranks=[0, 1, 2, 3, 4], outliers=[1, 4]))
    assert (found.rank, found.suspects_node, found.ranks) == (None, False, [1, 4])


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", mismatch(outliers="x"), mismatch(step=None)]
)
def test_nothing_and_malformed_reports_are_no_finding(text: str | None) -> None:
    assert reported(text) == []
