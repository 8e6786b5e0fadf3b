"""The verdicts and false alarms that the demo counts, with a server that has one incident."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from paceline_cli.client import Client
from paceline_demo.cluster import Cluster
from paceline_demo.report import DemoReport
from paceline_demo.scenario import Scenario


class Server:
    """The calls of `Scenario.poll`, answered with a running job, an incident and an action."""

    def __init__(self, severity: str, action_state: str = "superseded") -> None:
        self.incident = {"id": "i1", "summary": "text", "evidence": [], "severity": severity}
        self.action = {"id": "a1", "kind": "restart", "state": action_state, "phases": []}

    def get(self, path: str, **_: Any) -> dict[str, Any]:
        job = dict.fromkeys(("step", "step_seconds", "loss", "evaluation_loss"))
        return {**job, "state": "running", "generation": 1, "restarts": 0, "ledger": {}}

    def items(self, path: str, **_: Any) -> list[dict[str, Any]]:
        return [self.incident if path == "/incidents" else self.action]


def scenario_of(server: Server, shown: list[str]) -> Scenario:
    return Scenario(
        client=cast(Client, server),
        cluster=cast(Cluster, None),
        mode="auto",
        approve=False,
        chance=random.Random(1),
        start_job=lambda: "job",
        show=shown.append,
        progress=lambda line: None,
        report=DemoReport(),
    )


@pytest.mark.parametrize(("severity", "alarms"), [("info", 0), ("warning", 1), ("critical", 1)])
def test_an_info_is_no_false_alarm(severity: str, alarms: int) -> None:
    shown: list[str] = []
    scenario = scenario_of(Server(severity), shown)
    scenario.poll()
    assert scenario.report.findings_while_healthy == alarms
    assert shown == ["detected: text"]


def test_a_repair_that_nobody_approves_says_so() -> None:
    waiting = scenario_of(Server("warning", "proposed"), [])
    assert waiting._why_not_repaired("throttle").endswith("(paceline actions approve a1)")
    running = scenario_of(Server("warning", "running"), [])
    assert "not repaired" in running._why_not_repaired("throttle")
