"""Real ranks whose loss becomes NaN, or whose replicas differ: back to before the damage."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.waiting import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.campaign, pytest.mark.timeout(1800)]

NODE_COUNT = 3
RANKS = 4
POISONED = 90
SKIPPED = 100  # losses are read twice a second, on a busy machine more seldom
SECONDS = 600.0  # each of them, also on a busy machine


class Step(NamedTuple):
    """One step of one rank, as its script wrote it."""

    generation: int
    batch: int
    loss: float
    digest: str


class Job:
    """A job of `damaged_trainer.py`."""

    def __init__(
        self, client: httpx.Client, directory: Path, policy: dict[str, Any], **environment: str
    ) -> None:
        script = Path(__file__).with_name("damaged_trainer.py")
        body = {
            "name": "damaged",
            "argv": [sys.executable, str(script), str(directory)],
            "topology": {"dp": RANKS, "pp": 1, "tp": 1},
            "environment": environment,
            "policy": {"mode": "auto", **policy},
        }
        self.client, self.directory = client, directory
        self.job_id = client.post("/jobs", json=body).raise_for_status().json()["id"]

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def view(self) -> Any:
        return self.get(f"/jobs/{self.job_id}")

    def actions(self, kind: str) -> list[Any]:
        items = self.get(f"/actions?job={self.job_id}")["items"]
        return sorted(
            (item for item in items if item["kind"] == kind), key=lambda item: item["created_at"]
        )

    def incidents(self, kind: str) -> list[Any]:
        items = self.get(f"/incidents?job={self.job_id}")["items"]
        return [item for item in items if item["kind"] == kind]

    def steps(self, rank: int, generation: int) -> list[Step]:
        path = self.directory / f"rank{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        found = (line.split() for line in lines)
        steps = [Step(int(one[0]), int(one[1]), float(one[2]), one[3]) for one in found]
        return [step for step in steps if step.generation == generation]

    def batches(self, generation: int) -> list[int]:
        """Return the batches that all ranks trained in this generation."""
        each = [self.steps(rank, generation) for rank in range(RANKS)]
        least = min(map(len, each))
        batches = [step.batch for step in each[0][:least]]
        assert all([step.batch for step in one[:least]] == batches for one in each)
        return batches

    def wait_for_batch(self, generation: int, batch: int) -> None:
        wait_for(
            lambda: (self.batches(generation) or [-1])[-1] >= batch,
            f"batch {batch} in generation {generation}",
            SECONDS,
        )

    def wait_until(self, state: str, generation: int) -> None:
        def is_so() -> bool:
            view = self.view()
            return bool((view["state"], view["generation"]) == (state, generation))

        wait_for(is_so, f"{state} in generation {generation}", SECONDS)


def test_after_a_nan_the_ranks_go_back_leave_its_data_out_and_train_on(
    client: httpx.Client, tmp_path: Path
) -> None:
    job = Job(client, tmp_path, {"loss_skip_steps": SKIPPED}, POISONED=str(POISONED))
    job.wait_until("running", 2)
    (restart,) = job.actions("restart")
    resumed = wait_for(lambda: job.actions("restart")[0]["resumed_step"], "the step", SECONDS)
    job.wait_for_batch(2, POISONED + SKIPPED + 20)

    (incident,) = job.incidents("failure")
    onset = incident["onset_step"]
    assert incident["cause"] == "non-finite loss"
    assert onset <= POISONED + 1
    assert f"before step {onset}" in restart["reason"]
    batches = job.batches(2)
    assert batches[0] == resumed <= POISONED
    assert resumed % 20 == 0, "a checkpoint of the script"
    assert POISONED not in batches
    left_out = sorted(set(range(resumed, batches[-1])) - set(batches))
    assert left_out == list(range(left_out[0], left_out[0] + SKIPPED))
    for rank in range(RANKS):
        assert any(math.isnan(step.loss) for step in job.steps(rank, 1)[POISONED:])
        assert all(math.isfinite(step.loss) for step in job.steps(rank, 2))
        assert job.steps(rank, 2)[0].digest == job.steps(rank, 1)[resumed].digest
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    aside = [int(name.rpartition("-")[2]) for name in names if name.startswith("rolled-back-step")]
    assert all(step > resumed for step in aside)
    assert not job.view()["verdict"]["kind"].startswith("failure")


def test_a_nan_that_returns_twice_ends_the_job_with_the_evidence(
    client: httpx.Client, tmp_path: Path
) -> None:
    job = Job(client, tmp_path, {}, POISONED=str(POISONED))
    job.wait_until("failed", 3)
    first, second = job.actions("restart")
    for generation, restart in ((2, first), (3, second)):
        assert restart["state"] == "done"
        steps = job.steps(0, generation)
        assert steps[0].batch == restart["resumed_step"] <= POISONED
        assert any(math.isnan(step.loss) for step in steps)
    (stop,) = job.actions("stop")
    assert stop["reason"].startswith("Gave up: The loss is nan at step ")
    assert first["id"] in stop["reason"]
    assert second["id"] in stop["reason"]
    assert job.actions("restart") == [first, second]


def test_a_flipped_bit_of_one_rank_is_found_and_its_node_left_behind(
    client: httpx.Client, tmp_path: Path
) -> None:
    job = Job(client, tmp_path, {})
    job.wait_for_batch(1, 60)
    victim = next(rank for rank in range(RANKS) if node_of(job, rank) == "node-1")
    (tmp_path / f"flip-{victim}").touch()
    (incident,) = wait_for(lambda: job.incidents("corruption"), "the report", SECONDS)
    assert (incident["rank"], incident["node"]) == (victim, "node-1")
    (proposal,) = wait_for(lambda: job.actions("restart"), "the proposal", SECONDS)
    assert (proposal["state"], proposal["exclude_nodes"]) == ("proposed", ["node-1"])

    client.post(f"/actions/{proposal['id']}/approve").raise_for_status()
    job.wait_until("running", 2)
    job.wait_for_batch(2, job.batches(1)[-1] + 5)
    resumed = job.batches(2)[0]
    digests = [[step.digest for step in job.steps(rank, 1)] for rank in range(RANKS)]
    flipped = next(
        number for number, one in enumerate(zip(*digests, strict=False)) if len(set(one)) > 1
    )
    assert 0 < resumed <= flipped
    healthy = [step.digest for step in job.steps(0, 1)][resumed]
    for rank in range(RANKS):
        assert job.steps(rank, 2)[0].digest == healthy
    assert {node_of(job, rank) for rank in range(RANKS)} == {"node-0", "node-2"}


def node_of(job: Job, rank: int) -> str:
    ranks = job.get(f"/jobs/{job.job_id}/ranks")["items"]
    return str(next(one["node"] for one in ranks if one["rank"] == rank))
