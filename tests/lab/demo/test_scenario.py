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
    """The calls of `Scenario.poll`, answered with a running job and one incident."""

    def __init__(self, severity: str) -> None:
        self.incident = {"id": "i1", "summary": "text", "evidence": [], "severity": severity}

    def get(self, path: str, **_: Any) -> dict[str, Any]:
        job = dict.fromkeys(("step", "step_seconds", "loss", "evaluation_loss"))
        return {**job, "state": "running", "generation": 1, "restarts": 0, "ledger": {}}

    def items(self, path: str, **_: Any) -> list[dict[str, Any]]:
        return [self.incident] if path == "/incidents" else []


@pytest.mark.parametrize(("severity", "alarms"), [("info", 0), ("warning", 1), ("critical", 1)])
def test_an_info_is_no_false_alarm(severity: str, alarms: int) -> None:
    shown: list[str] = []
    scenario = Scenario(
        client=cast(Client, Server(severity)),
        cluster=cast(Cluster, None),
        mode="auto",
        approve=False,
        chance=random.Random(1),
        start_job=lambda: "job",
        show=shown.append,
        progress=lambda line: None,
        report=DemoReport(),
    )
    scenario.poll()
    assert scenario.report.findings_while_healthy == alarms
    assert shown == ["detected: text"]
