"""External jobs (torchrun, Slurm, a shell) with real servers and simulated nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from simulated_node import STEP_SECONDS, SimulatedNode, post_job
from sqlalchemy import delete

from paceline_cli.main import main
from paceline_server.engine.engine import Engine
from paceline_server.store.models import AttachmentRow, EngineMemoryRow, HotLogRow
from paceline_wire.batch import RankExited, RankStackTraces
from paceline_wire.stacks import StackFrame, ThreadStack
from paceline_wire.topology import Topology

pytestmark = pytest.mark.any_database

PAIR = Topology(dp=2)


@pytest.fixture
def job(server: Any) -> Callable[[str], dict[str, Any] | None]:
    def of(job_id: str) -> dict[str, Any] | None:
        answer = server.client.get(f"/api/v1/jobs/{job_id}")
        return None if answer.status_code == 404 else dict(answer.raise_for_status().json())

    return of


def wait_until_stored(nodes: list[SimulatedNode], wait_for: Callable[..., Any]) -> None:
    """Wait until all batches sent so far are stored."""
    before = [node.acknowledged for node in nodes]
    wait_for(
        lambda: all(
            node.acknowledged > known + 1 for node, known in zip(nodes, before, strict=True)
        )
    )


def trains(server: Any, job_id: str, generation: int) -> bool:
    """Return whether every rank has finished steps."""
    job = server.client.get(f"/api/v1/jobs/{job_id}").json()
    ranks = server.client.get(f"/api/v1/jobs/{job_id}/ranks").json().get("items", [])
    return job["generation"] == generation and min(rank["step"] or 0 for rank in ranks) >= 3


def test_an_external_job_appears_with_its_last_rank_and_ends_with_its_ranks(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    nodes[0].run_external("slurm-7", 0, PAIR)
    wait_until_stored(nodes, wait_for)
    time.sleep(0.5)
    assert job("slurm-7") is None
    nodes[1].run_external("slurm-7", 1, PAIR)
    found = wait_for(lambda: job("slurm-7"), "the job")
    assert (found["state"], found["watched"], found["mode"]) == ("running", True, "observe")
    wait_for(lambda: (job("slurm-7")["step"] or 0) >= 3, "steps")
    steps = server.client.get("/api/v1/jobs/slurm-7/steps").json()["items"]
    assert steps[0]["step"] == 0, "batches sent before the last rank attached are not lost"
    ranks = server.client.get("/api/v1/jobs/slurm-7/ranks").json()["items"]
    assert [(rank["node"], rank["pid"]) for rank in ranks] == [("node-0", 1000), ("node-1", 1001)]
    held = server.client.get("/api/v1/nodes").json()["items"]
    assert [node["job_id"] for node in held] == ["slurm-7", "slurm-7", None]

    refused = server.client.post("/api/v1/jobs/slurm-7/stop")
    assert refused.status_code == 409
    assert "stop it where it was started" in refused.json()["detail"]
    for number in range(2):
        nodes[number].finish(number)
    wait_for(lambda: job("slurm-7")["state"] == "finished", "the end")
    held = server.client.get("/api/v1/nodes").json()["items"]
    assert all(node["job_id"] is None for node in held)
    assert not any(node.carried_out for node in nodes), "nothing was ever commanded"
    with server.program.database.write() as session:
        session.execute(delete(HotLogRow))
    analysis = server.client.get("/api/v1/jobs/slurm-7/what-if").json()
    assert "not fully stored" not in analysis["verdict"]["text"], "its last steps are kept"


def test_an_external_job_is_named_after_its_script(
    nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    scripts = {"train.py": "train.py", "\0\n": "train-1", "x\x1b" * 200: "x" * 200}
    for number, script in enumerate(scripts):
        nodes[number].run_external(f"train-{number}", 0, Topology(), metadata={"script": script})
    for number, name in enumerate(scripts.values()):
        found = wait_for(lambda number=number: job(f"train-{number}"), "the job")
        assert (found["id"], found["name"]) == (f"train-{number}", name)


def test_a_crash_is_reported_and_not_repaired(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    for number in range(2):
        nodes[number].run_external("train", number, PAIR)
    wait_for(lambda: ((job("train") or {}).get("step") or 0) >= 3, "steps")
    nodes[1].crash(1)
    nodes[0].vanish(0)
    wait_for(lambda: job("train")["state"] == "failed", "the end")
    incident = server.client.get("/api/v1/incidents?job=train").json()["items"][0]
    assert (incident["kind"], incident["rank"]) == ("failure", 1)
    assert -1 < incident["urgency"] < 0, "it comes after those of running jobs"
    # torchrun --max-restarts: the same ranks in new processes are another generation.
    for number in range(2):
        nodes[number].run_external("train", number, PAIR, generation=1)
    wait_for(lambda: job("train")["state"] == "running", "the next generation")
    wait_for(lambda: job("train")["generation"] == 1 and (job("train")["step"] or 0) >= 3, "steps")
    assert len(server.client.get("/api/v1/jobs/train/ranks").json()["items"]) == 2


@pytest.mark.parametrize("restarted_as", [0, 1])
def test_a_second_failure_after_a_restart_is_another_incident(
    server: Any,
    nodes: list[SimulatedNode],
    job: Any,
    wait_for: Callable[..., Any],
    restarted_as: int,
) -> None:
    """Another run with the same name has the same generation.

    A restart by torchrun has the next one.
    """

    def incidents() -> list[dict[str, Any]]:
        """Return the incidents, the newest first."""
        return list(server.client.get("/api/v1/incidents?job=train").json()["items"])

    def run_and_fail(generation: int, first_pid: int) -> dict[str, Any]:
        """Return the verdict while the ranks train."""
        for number in range(2):
            pid = first_pid + number
            nodes[number].run_external("train", number, PAIR, generation=generation, pid=pid)
        wait_for(lambda: (job("train") or {}).get("state") == "running", "the run")
        wait_for(lambda: trains(server, "train", generation), "steps")
        verdict = dict(job("train")["verdict"])
        nodes[1].crash(1)
        nodes[0].crash(0)
        wait_for(lambda: job("train")["state"] == "failed", "the end")
        return verdict

    run_and_fail(0, 500)
    assert run_and_fail(restarted_as, 600)["kind"] == "healthy"
    assert [one["state"] for one in incidents()] == ["open", "resolved"]
    assert job("train")["verdict"]["incident_id"] == incidents()[0]["id"]


def test_the_cause_of_a_sudden_end_is_reported_before_the_job_ends(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    """torchrun ends all ranks when one has died, and their exit codes are unknown."""
    for rank in range(2):
        nodes[0].run_external("train", rank, PAIR)
    wait_for(lambda: ((job("train") or {}).get("step") or 0) >= 3, "steps")
    for rank in range(2):
        nodes[0].vanish(rank)
    wait_for(lambda: job("train")["state"] == "failed", "the end")
    (incident,) = server.client.get("/api/v1/incidents?job=train").json()["items"]
    assert (incident["kind"], incident["ranks"]) == ("failure", [0, 1])


def test_the_ledger_covers_all_generations(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    started = []
    for node in nodes:
        node.startup_seconds = 2.0
    for generation in range(3):
        for number in range(2):
            nodes[number].run_external("train", number, PAIR, generation=generation)
        wait_for(lambda: job("train"), "the job")
        wait_for(lambda number=generation: trains(server, "train", number), "steps")
        started.append(job("train")["ledger"]["startup_seconds"])
        for number in range(2):
            nodes[number].crash(number)
        wait_for(lambda: job("train")["state"] == "failed", "the end")
        with server.program.database.read() as session:
            kept = session.get_one(EngineMemoryRow, "train").memory
        steps = Engine("train", memory=kept).ledger(time.time_ns()).useful_steps
        assert steps >= 3, (
            "the stored memory covers this generation: a rebuild need not read it again"
        )
    assert started[0] > 0
    assert started == [started[0]] * 3, "a job starts up once; then it is restarted"


def test_ranks_that_were_started_again_are_starting_until_they_finish_a_step(
    nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    for number in range(2):
        nodes[number].run_external("train", number, PAIR)
    wait_for(lambda: ((job("train") or {}).get("step") or 0) >= 3, "steps")
    for number in range(2):
        nodes[number].startup_seconds = 1e9
        nodes[number].crash(number)
    wait_for(lambda: job("train")["state"] == "failed", "the end")
    for number in range(2):
        nodes[number].run_external("train", number, PAIR, generation=1)
    wait_for(lambda: job("train")["state"] == "running", "the restart")
    shown = job("train")
    assert (shown["step"], shown["condition"], shown["verdict"]["kind"]) == (
        None,
        "starting",
        "starting",
    )


def test_a_restart_counted_on_some_nodes_is_a_generation_of_the_job(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    """torchrun counts a restart on the node where a rank failed, not on the others."""
    created = []
    for generation, reported in enumerate([(0, 0), (0, 1), (1, 1), (1, 2)]):
        for number in range(2):
            if generation:
                nodes[number].crash(number)
            pid = 500 + 10 * generation + number
            nodes[number].run_external("train", number, PAIR, generation=reported[number], pid=pid)
        wait_for(lambda: job("train"), "the job")
        wait_for(lambda number=generation: trains(server, "train", number), f"{reported}")
        created.append(job("train")["created_at"])
    assert created == [created[0]] * 4, "one job, restarted"
    assert job("train")["state"] == "running"

    for number in range(2):
        path = f"/api/v1/jobs/train/ranks/{number}/stacks"
        assert server.client.post(path).status_code == 202
        order = wait_for(lambda home=nodes[number]: home.carried_out, "the command")[-1]
        assert (order.ranks, order.generation) == ([number], 1 + number)
        stack = ThreadStack("MainThread", [StackFrame("step", "train.py", 1)])
        nodes[number].report(
            RankStackTraces(
                time_ns=time.time_ns(),
                job="train",
                generation=order.generation,
                rank=number,
                threads=[stack],
            )
        )
        wait_for(lambda of=path: server.client.get(of).json()["stacks"], "the stacks")
    nodes[1].crash(1)
    nodes[0].crash(0)
    wait_for(lambda: job("train")["state"] == "failed", "the end")


def test_a_later_generation_ends_one_whose_node_is_lost(
    nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    """This happens after a node failure under Slurm, which requeues the job."""
    for number in range(2):
        nodes[number].run_external("slurm-8", number, PAIR)
    wait_for(lambda: ((job("slurm-8") or {}).get("step") or 0) >= 2, "steps")
    nodes[1].stop()
    nodes[0].crash(0)
    for number, node in enumerate((nodes[0], nodes[2])):
        node.run_external("slurm-8", number, PAIR, generation=100)
    wait_for(lambda: job("slurm-8")["generation"] == 100, "the later generation")
    wait_for(lambda: job("slurm-8")["state"] == "running", "training")


def test_another_run_of_the_same_name_replaces_the_ended_one(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    def run(first_pid: int, steps: int) -> None:
        began = datetime.now(UTC) - timedelta(seconds=STEP_SECONDS)
        for number in range(2):
            nodes[number].run_external("local", number, PAIR, pid=first_pid + number)
        wait_for(lambda: (job("local") or {}).get("state") == "running", "the job")
        wait_for(lambda: (job("local")["step"] or 0) >= steps, "steps")
        for number in range(2):
            nodes[number].finish(number)
        wait_for(lambda: job("local")["state"] == "finished", "the end")
        items = server.client.get("/api/v1/jobs/local/steps").json()["items"]
        assert [each["step"] for each in items] == list(range(len(items)))
        assert all(datetime.fromisoformat(each["started_at"]) >= began for each in items)

    run(500, 8)
    run(600, 2)  # fewer steps, and none of the first run
    assert len(server.client.get("/api/v1/jobs").json()["items"]) == 1


def test_a_run_counts_its_own_generations(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    def run(generation: int, first_pid: int) -> list[Any]:
        """Return the displayed steps of the run."""
        began = datetime.now(UTC) - timedelta(seconds=STEP_SECONDS)
        for number in range(2):
            nodes[number].run_external(
                "train", number, PAIR, generation=generation, pid=first_pid + number
            )
        wait_for(lambda: (job("train") or {}).get("generation") == generation, "the job")
        wait_for(lambda: (job("train")["step"] or 0) >= 2, "steps")
        steps = server.client.get("/api/v1/jobs/train/steps").json()["items"]
        assert [each["step"] for each in steps] == list(range(len(steps)))
        return [each for each in steps if datetime.fromisoformat(each["started_at"]) < began]

    run(2, 500)
    for number in range(2):
        nodes[number].finish(number)
    wait_for(lambda: job("train")["state"] == "finished", "the end")
    assert not run(0, 600)
    # The end of the previous run may never have been reported.
    run(1, 700)
    assert not run(0, 800)


def test_a_run_that_begins_right_after_another_is_taken_up(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    for number in range(2):
        nodes[number].run_external("local", number, PAIR)
    wait_for(lambda: (job("local") or {}).get("state") == "running", "the job")
    for number in range(2):
        # In one batch or in two, and then repeated.
        nodes[number].crash(number)
        nodes[number].run_external("local", number, PAIR, pid=600 + number)
        exited = RankExited(
            time_ns=time.time_ns(), job="local", generation=0, rank=number, pid=1000 + number
        )
        nodes[number].report(exited)

    def pids() -> list[int]:
        items = server.client.get("/api/v1/jobs/local/ranks").json()["items"]
        return [rank["pid"] for rank in items]

    wait_for(lambda: pids() == [600, 601], "the next run")
    wait_until_stored(nodes, wait_for)
    assert job("local")["state"] == "running"
    wait_for(lambda: (job("local")["step"] or 0) >= 3, "steps")


def test_a_run_on_the_same_nodes_ends_one_whose_end_was_not_reported(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    """This happens after a reboot, or if ranks ended while their agent was down."""

    def pids() -> list[int]:
        items = server.client.get("/api/v1/jobs/local/ranks").json()["items"]
        return [rank["pid"] for rank in items]

    for first_pid in (500, 600):
        for number in range(2):
            nodes[number].run_external("local", number, PAIR, pid=first_pid + number)
        wait_for(lambda: (job("local") or {}).get("state") == "running", "the job")
        wait_for(lambda first=first_pid: pids() == [first, first + 1], "its ranks")
    wait_for(lambda: (job("local")["step"] or 0) >= 3, "steps")


def test_a_second_job_of_the_same_name_waits_for_the_end_of_the_first(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    def node() -> str:
        items = server.client.get("/api/v1/jobs/local/ranks").json()["items"]
        return str(items[0]["node"])

    nodes[0].run_external("local", 0, Topology())
    wait_for(lambda: job("local"), "the first")
    nodes[1].run_external("local", 0, Topology())
    wait_until_stored(nodes, wait_for)
    time.sleep(0.5)
    assert (job("local")["state"], node()) == ("running", "node-0")
    nodes[0].finish(0)
    wait_for(lambda: node() == "node-1", "the second")
    wait_for(lambda: job("local")["state"] == "running", "the second")


@pytest.mark.parametrize(("user", "replaces"), [(1001, False), (1000, True), (0, True)])
def test_a_later_run_on_another_node_replaces_only_that_of_its_user(
    nodes: list[SimulatedNode],
    job: Any,
    wait_for: Callable[..., Any],
    user: int,
    replaces: bool,
) -> None:
    """Anyone with a shell on a node can report a rank of any job that has none there."""
    for number in range(2):
        nodes[number].run_external("slurm-8", number, PAIR, user=1000)
    wait_for(lambda: ((job("slurm-8") or {}).get("step") or 0) >= 2, "steps")
    nodes[2].run_external("slurm-8", 0, Topology(), generation=100, user=user)
    if not replaces:
        step = job("slurm-8")["step"]
        wait_for(lambda: job("slurm-8")["step"] >= step + 8, "more steps")
        assert (job("slurm-8")["generation"], job("slurm-8")["state"]) == (0, "running")
        for number in range(2):
            nodes[number].finish(number)
    wait_for(lambda: job("slurm-8")["generation"] == 100, "the later run")


def test_a_second_job_on_a_node_keeps_it_after_the_first_ends(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    """A node that an external job uses is not free for a job of Paceline."""

    def node() -> Any:
        return server.client.get("/api/v1/nodes").json()["items"][0]

    def holder() -> Any:
        return node()["job_id"]

    for rank, name in enumerate(("first", "second")):
        nodes[0].run_external(name, rank, PAIR, pid=500)
        nodes[1].run_external(name, 1 - rank, PAIR, pid=500 + rank)
        wait_for(lambda name=name: (job(name) or {}).get("state") == "running", "the job")
    assert holder() == "first"
    assert node()["ranks_by_job"] == {"first": [0], "second": [1]}
    lines = CliRunner().invoke(main, ["nodes", "--server", server.url]).stdout.splitlines()
    assert re.search(r"^node-0 .* first, second +0; 1 ", lines[1])
    nodes[0].finish(0)
    nodes[1].finish(1)
    wait_for(lambda: job("first")["state"] == "finished", "the end of the first")
    assert (holder(), node()["ranks_by_job"]) == ("second", {"second": [1]})
    nodes[0].finish(1)
    nodes[1].finish(0)
    wait_for(lambda: job("second")["state"] == "finished", "the end of the second")
    assert holder() is None


def test_repeated_reports_of_ranks_change_nothing(
    nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    for number in range(2):
        nodes[number].run_external("slurm-9", number, PAIR)
    wait_for(lambda: (job("slurm-9") or {}).get("state") == "running", "the job")
    created = job("slurm-9")["created_at"]
    for number in range(2):
        nodes[number].report_again(number)
    wait_until_stored(nodes, wait_for)
    time.sleep(0.5)
    assert job("slurm-9")["created_at"] == created
    assert job("slurm-9")["state"] == "running"
    for number in range(2):
        nodes[number].finish(number)
        nodes[number].report_again(number)
    wait_for(lambda: job("slurm-9")["state"] == "finished", "the end")
    wait_until_stored(nodes, wait_for)
    assert job("slurm-9")["state"] == "finished"


def test_invalid_names_and_jobs_started_by_paceline_are_ignored(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    own = post_job(server.url)
    wait_for(lambda: job(own)["state"] == "running", "training")
    for name in ("", "a/b", "../x", "x" * 65, "nul\0", "-x", "ümlaut"):
        nodes[2].run_external(name, 0, Topology())
    nodes[2].run_external("one", 0, Topology())
    wait_for(lambda: job("one"), "the one with a name")
    with server.program.database.read() as session:
        assert {row.job_id for row in session.query(AttachmentRow)} == {"one"}
    assert not job(own)["watched"]
    listed = server.client.get("/api/v1/jobs").json()["items"]
    assert {each["id"] for each in listed} == {own, "one"}


def slurm(node: int, restarts: int = 0) -> dict[str, str]:
    """Return the metadata of a rank that Slurm started."""
    return {
        "slurm_job": "7",
        "slurm_node": f"node-{node}",
        "slurm_restarts": str(restarts),
    }


def test_without_slurms_commands_the_proposal_has_that_as_its_reason(
    server: Any,
    nodes: list[SimulatedNode],
    job: Any,
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for number in range(2):
        nodes[number].run_external("slurm-7", number, PAIR, metadata=slurm(number))
    wait_for(lambda: ((job("slurm-7") or {}).get("step") or 0) >= 3, "steps")
    assert job("slurm-7")["mode"] == "approve"
    nodes[1].crash(1)
    nodes[0].vanish(0)
    wait_for(lambda: job("slurm-7")["state"] == "failed", "the end")
    (action,) = server.client.get("/api/v1/actions?job=slurm-7").json()["items"]
    assert (action["kind"], action["state"]) == ("restart", "failed")
    assert action["error"].startswith("The server's host has no squeue: install Slurm's client")
    assert not any(node.carried_out for node in nodes), "agents were commanded nothing"


def test_a_rank_of_a_run_that_slurm_replaced_is_refused(
    server: Any, nodes: list[SimulatedNode], job: Any, wait_for: Callable[..., Any]
) -> None:
    """Its slurmd died: Slurm started the job on other nodes, and the old rank runs on."""
    for number in range(2):
        metadata = slurm(number, restarts=1)
        nodes[number].run_external("slurm-7", number, PAIR, generation=100, metadata=metadata)
    wait_for(lambda: ((job("slurm-7") or {}).get("step") or 0) >= 3, "steps")
    for rank in range(2):
        nodes[2].run_external("slurm-7", rank, PAIR, metadata=slurm(2))

    def refused() -> list[dict[str, Any]]:
        items = server.client.get("/api/v1/audit?job=slurm-7").json()["items"]
        return [item for item in items if item["verb"] == "refused"]

    wait_for(lambda: len(refused()) == 2, "the refusal")
    assert "Rank 0 of generation 0 still runs on node-2" in refused()[-1]["detail"]
    step = job("slurm-7")["step"]
    wait_for(lambda: job("slurm-7")["step"] > step + 2, "steps")
    assert (job("slurm-7")["generation"], job("slurm-7")["state"]) == (100, "running")
    ranks = server.client.get("/api/v1/jobs/slurm-7/ranks").json()["items"]
    assert [rank["node"] for rank in ranks] == ["node-0", "node-1"]

    def incident() -> Any:
        items = server.client.get("/api/v1/incidents?job=slurm-7").json()["items"]
        return next((item for item in items if item["kind"] == "earlier_run"), None)

    assert wait_for(incident, "the incident")["node"] == "node-2"
