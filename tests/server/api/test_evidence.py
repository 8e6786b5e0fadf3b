"""Stacks and Flight Recorder dumps on demand: requested from the node, stored, and displayed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from simulated_node import SimulatedNode, post_job, stop_all

from paceline_cli.main import main
from paceline_wire import dumps
from paceline_wire.batch import RankDump, RankStackTraces
from paceline_wire.commands import TakeDumps, TakeStacks
from paceline_wire.stacks import StackFrame, ThreadStack

RECORDED = Path(__file__).parents[1] / "flight_recorder" / "data" / "lock_gil_1st.tar.gz"
STACK = ThreadStack("MainThread", [StackFrame("__next__", "data.py", 88)])


@pytest.fixture
def nodes(server):
    fleet = [SimulatedNode(f"node-{number}", server.url) for number in range(2)]
    for node in fleet:
        node.start()
    yield {node.agent_id: node for node in fleet}
    stop_all(fleet)


def of(job: str, rank: int, generation: int = 1) -> dict[str, object]:
    return {"time_ns": time.time_ns(), "job": job, "generation": generation, "rank": rank}


def orders(node: SimulatedNode, kind: type) -> list:
    return [command for command in node.carried_out if isinstance(command, kind)]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_stacks_and_dumps_on_demand(server, nodes, wait_for):
    def get(path: str):
        return server.client.get(f"/api/v1{path}").raise_for_status().json()

    def post(path: str):
        return server.client.post(f"/api/v1{path}")

    job = post_job(server.url)
    wait_for(lambda: get(f"/jobs/{job}")["state"] == "running", "training")
    homes = {rank["rank"]: rank["node"] for rank in get(f"/jobs/{job}/ranks")["items"]}
    stacks, recorder = f"/jobs/{job}/ranks/1/stacks", f"/jobs/{job}/flight-recorder"
    assert get(stacks)["state"] == "none"
    assert get(recorder)["text"] == "No Flight Recorder dump: no rank has responded."

    asked = post(stacks)
    assert (asked.status_code, asked.json()["state"]) == (202, "asked")
    home, other_node = nodes[homes[1]], nodes[homes[0]]
    [order] = wait_for(lambda: orders(home, TakeStacks), "the command")
    assert (order.job, order.generation, order.ranks) == (job, 1, [1])
    forged = ThreadStack("MainThread", [StackFrame("forged", "x.py", 1)])
    sent = home.acknowledged
    wait_for(lambda: home.acknowledged >= sent + 2, "the result of the command, without stacks")
    assert get(stacks)["state"] == "asked"
    other_node.report(RankStackTraces(**of(job, 1), threads=[forged]))
    home.report(RankStackTraces(**of(job, 1, generation=0), threads=[forged]))
    home.report(RankStackTraces(**of(job, 1), threads=[STACK]))
    wait_for(lambda: get(stacks)["stacks"], "the stacks")
    wait_for(lambda: get(stacks)["state"] == "taken", "the result")
    [thread] = get(stacks)["stacks"]["threads"]
    assert thread["frames"] == [{"function": "__next__", "file": "data.py", "line": 88}]

    assert post(recorder).status_code == 202
    wait_for(lambda: all(orders(node, TakeDumps) for node in nodes.values()), "both commands")
    with tarfile.open(RECORDED) as archive:
        written = archive.extractfile("lock_gil_1st/_dump_0").read()
    nodes[homes[0]].report(RankDump(**of(job, 0), content=dumps.pack(written)))
    home.report(RankDump(**of(job, 1), error="no pipe"))
    wait_for(lambda: len(get(recorder)["dumps"]) == 2, "both answers")
    assert get(recorder)["text"].endswith("too few to conclude from: no pipe.")
    home.report(RankDump(**of(job, 1), error="requested, not written", was_asked=True))
    report = wait_for(lambda: get(recorder)["report"], "the report")
    assert 1 in report["without_dump"]

    verbs = [record["verb"] for record in get(f"/audit?job={job}")["items"]]
    assert {"asked for stacks", "asked for Flight Recorder dumps"} <= set(verbs)
    assert post(f"/jobs/{job}/ranks/7/stacks").status_code == 404
    assert post("/jobs/job-0/flight-recorder").status_code == 404
    post(f"/jobs/{job}/stop").raise_for_status()
    wait_for(lambda: get(f"/jobs/{job}")["state"] == "stopped", "the end")
    assert post(stacks).status_code == 409
    assert post(recorder).status_code == 409


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_cli_waits_for_the_nodes_and_shows_the_result(server, nodes, wait_for):
    started: list[subprocess.Popen[str]] = []

    def paceline(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline_cli", "jobs", *words, "--server", server.url]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    job = post_job(server.url)
    path = f"/api/v1/jobs/{job}"
    wait_for(lambda: server.client.get(path).json()["state"] == "running", "training")
    ranks = server.client.get(f"{path}/ranks").json()["items"]
    home = {rank["rank"]: nodes[rank["node"]] for rank in ranks}
    try:
        asking = paceline("stacks", job, "--rank", "1", "--timeout", "60")
        wait_for(lambda: orders(home[1], TakeStacks), "the command")
        home[1].report(RankStackTraces(**of(job, 1), threads=[STACK]))
        shown, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0
        assert shown == "Rank 1, thread MainThread:\n    __next__  data.py:88\n"

        asking = paceline("flight-recorder", job, "--timeout", "60")
        wait_for(lambda: all(orders(node, TakeDumps) for node in nodes.values()), "the commands")
        for rank, node in home.items():
            node.report(RankDump(**of(job, rank), error="no pipe", was_asked=True))
        shown, _ = asking.communicate(timeout=60)
        assert asking.returncode == 1  # no rank has a dump
        assert shown.splitlines() == ["No Flight Recorder dump: no pipe.", "  ranks 0-1: no pipe"]

        words = ["jobs", "stacks", job, "--rank", "7", "--server", server.url]
        refused = CliRunner().invoke(main, words)
        assert refused.exit_code == 1
        assert "no rank '7'. `paceline jobs show JOB` lists its ranks." in refused.stderr
    finally:
        for each in started:
            each.kill()
            each.communicate()
