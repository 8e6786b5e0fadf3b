"""The measured pairs determine whether a node, a link or nothing is slow."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from paceline_cli.preflight.facts import Interface, NodeFacts, RdmaPort
from paceline_cli.preflight.plan import (
    BenchmarkPlan,
    Compute,
    Exchange,
    Result,
    line,
    pair_rounds,
    parse,
    scale_steps,
)
from paceline_cli.preflight.speeds import checks
from paceline_cli.preflight.verdict import Check

NODES = [f"node-{number}" for number in range(6)]
USUAL = 45e9


def pairs(speed_of: dict[frozenset[str], float | None]) -> list[Result]:
    """Return all pairs at 45 GB/s with normal variation, except those given.

    None: no connection.
    """
    found: list[Result] = []
    for number, (one, other) in enumerate(combinations(NODES, 2)):
        speed = speed_of.get(frozenset((one, other)), USUAL * (1 - 0.01 * (number % 4)))
        found.append(
            Exchange(
                nodes=[one, other],
                kind="pair",
                latency_seconds=None if speed is None else 25e-6,
                bus_bytes_per_second=speed,
                error="timed out" if speed is None else None,
            )
        )
    return found


def judged(results: list[Result]) -> dict[str, Check]:
    nodes = [NodeFacts(node=name, hostname=name, time_ns=0) for name in NODES]
    return {check.name: check for check in checks(results, nodes, "nccl")}


def usual_of(speed: float, ports: list[RdmaPort | Interface], backend: str) -> Check:
    nodes = [
        NodeFacts(
            node=name,
            hostname=name,
            time_ns=0,
            rdma_ports=[port for port in ports if isinstance(port, RdmaPort)],
            interfaces=[port for port in ports if isinstance(port, Interface)],
        )
        for name in NODES
    ]
    even = pairs({frozenset(pair): speed for pair in combinations(NODES, 2)})
    found = {check.name: check for check in checks(even, nodes, backend)}
    assert found["node pairs: slow nodes"].status == "pass"
    return found["node pairs: usual speed"]


NDR = RdmaPort(device="mlx5_0", port="1", state=4, rate_bits_per_second=400e9)
FAST = Interface(name="eth0", up=True, speed_bits_per_second=100e9, addresses=["10.0.0.1/24"])
SLOW = Interface(name="eth0", up=True, speed_bits_per_second=1e9, addresses=["10.0.0.1/24"])
MUTE = Interface(name="eth0", up=True, addresses=["10.0.0.1/24"])


@pytest.mark.parametrize(
    ("speed", "ports", "backend", "status"),
    [
        (45e9, [NDR, FAST], "nccl", "pass"),
        (12e9, [NDR, FAST], "nccl", "warn"),
        (12e9, [FAST], "nccl", "pass"),
        (2e9, [NDR, FAST], "gloo", "pass"),
        (0.2e9, [FAST], "gloo", "warn"),
        (0.1e9, [SLOW], "gloo", "pass"),
        (0.01e9, [SLOW], "gloo", "warn"),
        (0.01e9, [MUTE], "gloo", "pass"),
        (0.01e9, [], "gloo", "pass"),
    ],
)
def test_where_all_are_slow_alike_the_ports_tell(
    speed: float, ports: list[RdmaPort | Interface], backend: str, status: str
) -> None:
    assert usual_of(speed, ports, backend).status == status


def with_all_others(node: str, speed: float | None) -> dict[frozenset[str], float | None]:
    return {frozenset((node, other)): speed for other in NODES if other != node}


def test_even_pairs_name_nobody() -> None:
    found = judged(pairs({}))
    assert all(check.status in ("pass", "skip") for check in found.values()), found


def test_a_node_that_is_slow_with_all_is_named_and_no_link() -> None:
    found = judged(pairs(with_all_others("node-3", 20e9)))
    assert found["node pairs: slow nodes"].status == "fail"
    assert found["node pairs: slow nodes"].nodes == ["node-3"]
    assert found["node pairs: slow links"].status == "pass"


def test_two_slow_nodes_of_six_are_named() -> None:
    found = judged(pairs(with_all_others("node-1", 20e9) | with_all_others("node-5", 11e9)))
    assert found["node pairs: slow nodes"].nodes == ["node-1", "node-5"]


def test_one_slow_pair_is_a_link_and_names_no_node() -> None:
    found = judged(pairs({frozenset(("node-0", "node-4")): 20e9}))
    assert found["node pairs: slow nodes"].status == "pass"
    assert found["node pairs: slow links"].status == "fail"
    assert found["node pairs: slow links"].nodes == ["node-0", "node-4"]


def test_a_slightly_slow_node_is_a_warning() -> None:
    found = judged(pairs(with_all_others("node-3", 0.85 * USUAL)))
    assert (found["node pairs: slow nodes"].status) == "warn"


def test_who_reaches_nobody_is_named_alone() -> None:
    found = judged(pairs(with_all_others("node-2", None)))["nodes reach each other"]
    assert (found.status, found.nodes) == ("fail", ["node-2"])


def test_a_pair_that_does_not_connect_is_named_as_a_pair() -> None:
    cut: dict[frozenset[str], float | None] = {frozenset(("node-1", "node-2")): None}
    found = judged(pairs(cut))["nodes reach each other"]
    assert (found.status, found.nodes) == ("fail", ["node-1", "node-2"])


@pytest.mark.parametrize(("share", "status"), [(0.97, "pass"), (0.9, "warn"), (0.7, "fail")])
def test_a_slow_gpu_is_named_with_its_node(share: float, status: str) -> None:
    results: list[Result] = [
        Compute(
            node=node,
            device=f"cuda:{index}",
            matmul_flops_per_second=7e14 * (share if (node, index) == ("node-4", 3) else 1),
            memory_bytes_per_second=4e12,
            host_to_device_bytes_per_second=5e10,
        )
        for node in NODES
        for index in range(8)
    ]
    found = judged(results)["matrix multiplication"]
    assert found.status == status
    assert found.nodes == ([] if status == "pass" else ["node-4"])
    assert status == "pass" or "node-4 cuda:3" in found.evidence


def test_nodes_whose_gpus_cannot_exchange_anything_fail() -> None:
    """All are alike, so none is an outlier."""
    error = "NCCL error: unhandled system error"
    check = judged([Exchange(nodes=[node], kind="node", error=error) for node in NODES[:2]])[
        "all-reduce within a node"
    ]
    assert (check.status, check.nodes) == ("fail", NODES[:2])
    assert error in check.evidence


def test_a_fabric_that_holds_pairs_and_not_all_is_a_warning() -> None:
    steps: list[Result] = [
        Exchange(nodes=NODES[:count], kind="scale", bus_bytes_per_second=speed)
        for count, speed in ((2, 45e9), (3, 44e9), (6, 15e9))
    ]
    found = judged([*pairs({}), *steps])["2, 3, N nodes"]
    assert found.status == "warn"
    assert "6: 15 GB/s" in found.evidence


@pytest.mark.parametrize("count", range(2, 10))
def test_rounds_hold_every_pair_once_and_disjoint(count: int) -> None:
    rounds = list(pair_rounds(count))
    assert sorted(pair for each in rounds for pair in each) == list(combinations(range(count), 2))
    assert all(len({n for pair in each for n in pair}) == 2 * len(each) for each in rounds)


def test_scale_is_two_three_and_all() -> None:
    assert [scale_steps(count) for count in (1, 2, 3, 16)] == [[], [], [2, 3], [2, 3, 16]]


def test_results_are_found_in_what_launchers_add() -> None:
    first, second = pairs({})[:2]
    text = f"node-0: {line(first)}\nnoise\n[1,3]<stdout>:{line(second)}\n{line(first)[:40]}\n"
    assert list(parse(text)) == [first, second]


def test_a_plan_survives_any_shell() -> None:
    plan = BenchmarkPlan(
        nodes=NODES,
        hostnames=["a b", "'"],
        ranks_of_nodes=[8, 7, 8, 8, 8, 8],
        address="10.0.0.1",
        port=1,
        backend="gloo",
        rounds=8,
        bytes_at_most=1,
        seconds=0.1,
        patience_seconds=1,
        deadline_seconds=1,
    )
    assert BenchmarkPlan.decode(plan.encode()) == plan
    assert plan.encode().replace("-", "").replace("_", "").isalnum()
    assert [plan.ranks_of(node) for node in range(2)] == [range(8), range(8, 15)]
    assert all(a.stop == b.start for a, b in pairwise(plan.ranks_of(n) for n in range(6)))
