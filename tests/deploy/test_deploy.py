"""What lies in deploy/ can be read by what it is for, and asks only for what there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.node import FakeNode, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/paceline.json").read_text())
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))
RING_WRITER = Path(__file__).parents[1] / "agent/ring_writer.py"
_NAME = re.compile(r"\b(?:paceline|node|DCGM)_[A-Za-z0-9_]+")
_SECONDS = 20.0


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def names() -> set[str]:
    return {name for query in queries() for name in _NAME.findall(query)}


@pytest.fixture(scope="module")
def scraped() -> Iterator[str]:
    """What a real agent, with GPUs, HCAs and a rank, and a real server say on /metrics."""
    server, agent = free_port(), free_port()
    with FakeNode() as node:
        rings = node.directory / "node" / "rings"
        rings.mkdir(parents=True)
        data = f"sqlite:///{node.directory / 'server.db'}"
        command = [sys.executable, "-m", "paceline_cli", "server"]
        command += ["--host", "127.0.0.1", "--port", str(server), "--database-url", data]
        rank = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_JOB": "j", "PACELINE_GENERATION": "0"}
        rank["PACELINE_RING_DIRECTORY"] = str(rings)
        program = [sys.executable, str(RING_WRITER), "100"]
        with (
            node.running("server", command),
            node.running("rank", program, os.environ | rank),
            node.agent(f"http://127.0.0.1:{server}", "--metrics-port", str(agent)),
        ):
            yield _scrape(server, agent)


def _scrape(*ports: int) -> str:
    """Once everything that is asked for is there, or after some seconds."""
    deadline = time.monotonic() + _SECONDS
    while True:
        text = "".join(map(_get, ports))
        if names() <= exposed(text) or time.monotonic() > deadline:
            return text
        time.sleep(0.2)


def _get(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""  # not up yet


def exposed(text: str) -> set[str]:
    """Samples; and families without any yet, as of a server that has no job."""
    found = set(re.findall(r"^([A-Za-z_:][A-Za-z0-9_:]*)[{ ]", text, re.MULTILINE))
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE):
        found.add(f"{name}_total" if kind == "counter" and not name.endswith("_total") else name)
    return found


def test_every_metric_of_the_dashboard_is_exposed(scraped: str) -> None:
    assert len(names()) > 25
    assert names() - exposed(scraped) == set()


def test_labels_the_dashboard_joins_and_sums_by_are_there(scraped: str) -> None:
    (rank,) = re.findall(r"^paceline_rank_info\{(.*)\} 1", scraped, re.MULTILINE)
    assert 'job="j"' in rank
    assert 'rank="0"' in rank
    assert re.search(r"^DCGM_FI_DEV_SM_CLOCK\{.*UUID=", scraped, re.MULTILINE)
    assert re.search(r"^paceline_collector_success\{.*collector=", scraped, re.MULTILINE)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(queries()) + "${datasource}"))
    assert used <= variables
    for query in queries():
        assert query.count("(") == query.count(")"), query


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse_and_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)


def slurm(script: str, directory: Path, **more: str) -> str:
    variables = {
        "PATH": os.environ["PATH"],
        "PACELINE_NODE_DIRECTORY": str(directory),
        "PACELINE_AGENT_UNIT": "no-such.service",
        "PACELINE_EPILOG_SECONDS": "0",
        "SLURM_JOB_ID": "77",
        **more,
    }
    done = subprocess.run(
        [DEPLOY / "slurm" / script], env=variables, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_slurm_gives_ranks_their_rings_and_removes_them_afterwards(tmp_path: Path) -> None:
    slurm("prolog.sh", tmp_path)
    rings = tmp_path / "rings"
    assert rings.stat().st_mode & 0o7777 == 0o1777
    told = slurm("task-prolog.sh", tmp_path, SLURM_RESTART_COUNT="2").splitlines()
    assert f"export PACELINE_RING_DIRECTORY={rings}" in told
    assert "export PACELINE_JOB=slurm-77" in told
    assert "export PACELINE_GENERATION=2" in told
    for name in ("slurm-77.g2.r0.ring", "slurm-77.g1.r9.ring", "slurm-770.g0.r0.ring"):
        (rings / name).touch()
    slurm("epilog.sh", tmp_path)
    assert [path.name for path in rings.iterdir()] == ["slurm-770.g0.r0.ring"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd/paceline-agent.service").read_text()
    unit = tmp_path / "paceline-agent.service"
    unit.write_text(text.replace("/opt/paceline/bin/paceline", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_leaves_ranks_to_be_adopted() -> None:
    """With the default, systemd would kill them with their agent."""
    lines = (DEPLOY / "systemd/paceline-agent.service").read_text().splitlines()
    assert "KillMode=process" in lines
    assert "NoNewPrivileges=yes" in lines


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes/daemonset.yaml").read_text()))


def test_the_daemon_set_has_the_least_privilege() -> None:
    account, daemons = documents()
    assert account["automountServiceAccountToken"] is False
    pod = daemons["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    may = container["securityContext"]
    assert (may["privileged"], may["allowPrivilegeEscalation"]) == (False, False)
    assert may["readOnlyRootFilesystem"] is True
    assert may["capabilities"] == {"drop": ["ALL"], "add": ["SYSLOG", "SYS_PTRACE"]}
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in container["volumeMounts"]
    }
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    assert labels == daemons["spec"]["selector"]["matchLabels"]


def test_the_daemon_sets_command_is_one_that_the_agent_takes() -> None:
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    program, name, *options = container["args"]
    assert (program, name) == ("paceline", "agent")
    known = subprocess.run(
        [sys.executable, "-m", "paceline_agent", "--help"], capture_output=True, text=True
    ).stdout
    for option in options:
        assert option.split("=")[0] in known, option
