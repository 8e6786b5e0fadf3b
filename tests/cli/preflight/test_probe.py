from __future__ import annotations

import pytest

from paceline_cli.preflight.plan import BenchmarkPlan, Compute, Exchange, parse
from paceline_cli.preflight.probe import ProbeRank
from tests.ports import free_port


def test_a_rank_is_measured_although_no_node_is_complete(capfd: pytest.CaptureFixture[str]) -> None:
    """The other rank of the only node ended, such as one whose GPU cannot be used."""
    plan = BenchmarkPlan(
        nodes=["node-1"],
        hostnames=["node-1"],
        ranks_of_nodes=[2],
        address="127.0.0.1",
        port=free_port(),
        backend="gloo",
        rounds=1,
        bytes_at_most=1 << 16,
        seconds=0.01,
        patience_seconds=0.1,
        deadline_seconds=60,
    )
    ProbeRank(plan, 0, 0).run()
    computed, exchanged = parse(capfd.readouterr().out)
    assert isinstance(computed, Compute)
    assert isinstance(exchanged, Exchange)
    assert exchanged.error == "node-1 did not come"
