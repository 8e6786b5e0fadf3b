"""The process that asks Kubernetes is killed before and after each kind of call: each request is
carried out once: a JobSet that runs, one that restarts in place, one that failed, and TrainJobs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from committed_requests import CommittedRequests
from kubernetes_cluster import KubernetesCluster, jobset_of, train_job_of
from test_kubernetes import launch_of, runs

KILLS = int(os.environ.get("PACELINE_KUBERNETES_KILLS", "200"))
READS = ("get jobsets", "get controllerrevisions", "list pods", "get nodes", "patch nodes")
SUSPENDS = ("patch jobsets",) * 3  # suspend, mark the pods to come, resume
WAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # in the order of a request
    "suspended": (jobset_of(), (*READS, *SUSPENDS)),
    "in place": (
        jobset_of(maxRestarts=1000, restartStrategy="InPlaceRestart"),
        (*READS, "patch jobsets", "delete pods"),
    ),
    "failed": (
        jobset_of(),
        (
            *(*READS, "create controllerrevisions", "delete jobsets", "create jobsets"),
            *(*SUSPENDS[:2], "delete controllerrevisions"),
        ),
    ),
    "TrainJob": (
        train_job_of(),
        (*READS, "get trainjobs", "patch trainjobs", "patch jobsets", "patch trainjobs"),
    ),
    "failed TrainJob": (
        train_job_of(),
        (
            *(*READS, "create controllerrevisions", "delete trainjobs", "create trainjobs"),
            *("patch jobsets", "patch trainjobs", "delete controllerrevisions"),
        ),
    ),
}


class Killer:
    """Kills the process at given moments, such as "after patch nodes"."""

    def __init__(self, cluster: KubernetesCluster, requests: CommittedRequests) -> None:
        self.moments: list[str] = []
        self.kills = 0
        self._cluster, self._requests = cluster, requests
        cluster.on_call = self._on_call

    def _on_call(self, when: str, call: str) -> None:
        with self._cluster.lock:
            if self.moments and self.moments[0] == f"{when} {call}":
                self.moments.pop(0)
                self.kills += 1
                self._requests.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesCluster]:
    started = KubernetesCluster(tmp_path)
    started.start()
    yield started
    started.close()


@pytest.fixture
def requests(cluster: KubernetesCluster, tmp_path: Path) -> Iterator[CommittedRequests]:
    environment = {
        **os.environ,
        "PACELINE_SERVER_KUBERNETES_URL": cluster.url,
        "PACELINE_SERVER_KUBERNETES_CREDENTIALS": str(cluster.credentials),
    }
    opened = CommittedRequests(tmp_path, "jobset-training.train", environment)
    yield opened
    opened.close()


def carry_out(
    cluster: KubernetesCluster,
    requests: CommittedRequests,
    killer: Killer,
    number: int,
    way: str,
    moments: list[str],
    wait_for: Callable[..., Any],
) -> None:
    """Have one request carried out while the process is killed at these moments."""
    obj, _ = WAYS[way]
    resource = f"{obj['kind'].lower()}s"
    if cluster.get(resource, "train") is None:
        cluster.put(resource, copy.deepcopy(obj))  # the cluster changes it
    wait_for(lambda: runs(cluster, 2), "the pods")
    launch, pods = launch_of(cluster), len(cluster.started)
    excluded = sorted(cluster.nodes_of())[0]
    stayed = {pod["metadata"]["uid"] for pod in cluster.pods()}
    if way.startswith("failed"):
        cluster.fail_pod(excluded)
        wait_for(lambda: not cluster.pods(), "the failure")
        wait_for(
            lambda: (cluster.get(resource, "train") or {}).get("status", {}).get("conditions"),
            "the condition",
        )
    action_id = f"act-{number:08}"
    killer.moments += moments
    requests.request(action_id, launch, [excluded])

    def advance() -> bool:
        requests.ensure_process()
        return requests.result(action_id).state != "waiting"

    wait_for(advance, f"the restart; left of the moments: {killer.moments}", seconds=900.0)
    assert killer.moments == [], "each moment came"
    assert requests.result(action_id).state == "done", requests.result(action_id)
    assert runs(cluster, 2)
    started = cluster.started[pods:]
    in_place = way == "in place"
    assert len(started) == (1 if in_place else 2), "lost or twice"
    assert launch_of(cluster).restarts == launch.restarts + 1, "lost or twice"
    assert len(stayed & {pod["metadata"]["uid"] for pod in cluster.pods()}) == in_place
    assert excluded not in cluster.nodes_of()
    node = cluster.node(excluded)
    assert (node["spec"]["unschedulable"], node["metadata"]["annotations"]["paceline/action"]) == (
        True,
        action_id,
    )
    assert cluster.all("controllerrevisions") == []
    cluster.uncordon(excluded)


@pytest.mark.parametrize("way", ["suspended", "failed TrainJob"])
def test_a_killed_process_leaves_nothing_undone_or_twice(
    cluster: KubernetesCluster,
    requests: CommittedRequests,
    wait_for: Callable[..., Any],
    way: str,
) -> None:
    """The quick version: a kill after the most dangerous writes."""
    moments = {
        "suspended": ["after patch jobsets"],
        "failed TrainJob": ["after delete trainjobs", "after create trainjobs"],
    }[way]
    killer = Killer(cluster, requests)
    carry_out(cluster, requests, killer, 0, way, moments, wait_for)
    assert killer.kills == len(moments)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_each_request_is_carried_out_once_whenever_the_process_is_killed(
    cluster: KubernetesCluster,
    requests: CommittedRequests,
    wait_for: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    killer = Killer(cluster, requests)
    number = 0
    while killer.kills < KILLS:
        way = list(WAYS)[number % len(WAYS)]
        with cluster.lock:  # a job of the next kind
            for key in list(cluster.objects):
                if key[0] in ("jobsets", "trainjobs", "pods"):
                    del cluster.objects[key]
        for when in ("before", "after"):
            moments = [f"{when} {call}" for call in WAYS[way][1]]
            carry_out(
                cluster, requests, killer, 2 * number + (when == "after"), way, moments, wait_for
            )
        number += 1
    with capsys.disabled():
        print(
            f"\nkilled {killer.kills} times in {2 * number} requests: none lost, none carried out "
            "twice"
        )
