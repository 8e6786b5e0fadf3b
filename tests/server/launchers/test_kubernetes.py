"""The Kubernetes backend against a real HTTP API with the roles of deploy/ and with controllers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import (
    NAMESPACE,
    UID,
    KubernetesCluster,
    jobset_of,
    train_job_of,
)
from msgspec.structs import replace

from paceline_server.decide.types import LaunchRequest
from paceline_server.engine.types import Launch
from paceline_server.launchers.contract import (
    LauncherError,
    LauncherRefusedError,
    LauncherUnavailableError,
    ShownRequest,
)
from paceline_server.launchers.kubernetes import KubernetesLauncher
from paceline_server.launchers.kubernetes_api import KubernetesApi


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesCluster]:
    started = KubernetesCluster(tmp_path)
    started.start()
    yield started
    started.close()


@pytest.fixture
def hasty(cluster: KubernetesCluster) -> Iterator[KubernetesLauncher]:
    """A backend that waits for less time than a server that hangs takes."""
    opened = KubernetesApi(cluster.url, cluster.credentials, seconds=1.0)
    yield KubernetesLauncher(opened)
    opened.close()


@pytest.fixture
def api(cluster: KubernetesCluster) -> Iterator[KubernetesApi]:
    opened = KubernetesApi(cluster.url, cluster.credentials)
    yield opened
    opened.close()


@pytest.fixture
def launcher(api: KubernetesApi) -> KubernetesLauncher:
    return KubernetesLauncher(api)


Wait = Callable[..., Any]


def run(cluster: KubernetesCluster, wait_for: Wait, obj: dict[str, Any], pods: int = 2) -> Launch:
    """Start a job; return what its ranks report once all pods run."""
    cluster.put({"JobSet": "jobsets", "TrainJob": "trainjobs"}[obj["kind"]], obj)
    name = obj["metadata"]["name"]
    wait_for(lambda: runs(cluster, pods, name), "the pods")
    return launch_of(cluster, name)


def runs(cluster: KubernetesCluster, pods: int, name: str = "train") -> bool:
    found = cluster.pods(name)
    return len(found) == pods and all(pod["status"]["phase"] == "Running" for pod in found)


def launch_of(cluster: KubernetesCluster, name: str = "train") -> Launch:
    """Return the launch as the ranks of the running pods report it."""
    metadata = {}
    for pod in cluster.pods(name):
        labels, marks = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        counts = (
            labels["jobset.sigs.k8s.io/restart-attempt"],
            marks.get("jobset.sigs.k8s.io/in-place-restart-attempt", "0"),
            marks.get("paceline/restarts", "0"),
        )
        node = pod["spec"]["nodeName"]
        metadata[node] = {
            "kubernetes_job": f"{NAMESPACE}/{name}",
            "kubernetes_uid": labels[UID],
            "kubernetes_node": node,
            "kubernetes_restarts": str(sum(map(int, counts))),
        }
    launch = KubernetesLauncher.recognize(metadata)
    assert launch is not None
    return launch


def restart_of(launch: Launch, *exclude: str, action: str = "act-1") -> LaunchRequest:
    return LaunchRequest(
        action_id=action,
        kind="restart",
        launch=launch,
        exclude=list(exclude),
        reason="Rank 1 is slow: its GPU is hot.",
    )


def carry_out(launcher: KubernetesLauncher, request: LaunchRequest, wait_for: Wait) -> ShownRequest:
    """Repeat the two calls as the launch thread does; return the last observation."""
    shown: list[ShownRequest] = []

    def is_final() -> bool:
        shown.append(launcher.observe(request))
        if shown[-1].state not in ("ready", "begun"):
            return True
        launcher.begin(request, shown[-1])
        return False

    wait_for(is_final, "the request")
    return shown[-1]


def test_ranks_of_one_jobset_on_nodes_with_the_agents_names_are_recognized() -> None:
    def rank(node: str, job: str = "a/train", **more: str) -> dict[str, str]:
        metadata = {"kubernetes_job": job, "kubernetes_node": node, "kubernetes_restarts": "1"}
        return metadata | {"kubernetes_uid": "u"} | more

    recognize = KubernetesLauncher.recognize
    nodes = {"n0": "n0", "n1": "n1.cluster.example"}
    found = recognize({"n0": rank("n0"), "n1": rank("n1.cluster.example")})
    assert found == Launch(launcher="kubernetes", job="a/train", uid="u", restarts=1, nodes=nodes)
    assert recognize({"n0": {}}) is None
    assert recognize({"n0": rank("n0"), "n1": rank("n1", job="a/other")}) is None
    assert recognize({"n0": rank("n0"), "n1": rank("n1", kubernetes_uid="v")}) is None
    assert recognize({"n0": rank("n5")}) is None, "a rank may not speak for another node"
    assert recognize({"n0": rank("")}) is None
    assert recognize({"n0": rank("n0./../n3")}) is None, "a path is no name"
    for job in ("train", "a/../nodes", "a/b/c", "A/train", "a/train?x=1", "/train"):
        assert recognize({"n0": rank("n0", job=job)}) is None, job


@pytest.mark.parametrize("make", [jobset_of, train_job_of])
def test_a_job_is_suspended_and_resumed_once_on_other_nodes(
    cluster: KubernetesCluster,
    launcher: KubernetesLauncher,
    wait_for: Wait,
    make: Callable[[], dict[str, Any]],
) -> None:
    launch = run(cluster, wait_for, make())
    assert launch.restarts == 0
    request = restart_of(launch, "n0")
    assert not launcher.observe(request).has_effect
    done = carry_out(launcher, request, wait_for)
    assert (done.state, "on n1, n2" in done.detail) == ("done", True), done.detail
    assert done.has_effect
    assert len(cluster.started) == 4, "each pod was started once more"
    node = cluster.node("n0")
    assert node["spec"]["unschedulable"] is True
    assert node["metadata"]["annotations"] == {
        "paceline/action": "act-1",
        "paceline/reason": "Paceline act-1: Rank 1 is slow: its GPU is hot.",
    }
    assert launch_of(cluster).restarts == 1, "the new ranks report the next run"
    # A second action follows on what the first left.
    cluster.uncordon("n0")
    again = restart_of(launch_of(cluster), "n1", action="act-2")
    assert carry_out(launcher, again, wait_for).state == "done"
    assert (len(cluster.started), launch_of(cluster).restarts) == (6, 2)
    # The first is late, and repeated: it has no effect.
    writes = list(cluster.writes)
    late = launcher.observe(request)
    assert (late.state, "restarted meanwhile" in late.detail) == ("refused", True)
    assert cluster.writes == writes


def test_a_write_that_comes_late_or_twice_is_refused_by_the_api(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    """A process that was paused before its write continues after its successor has finished."""
    launch = run(cluster, wait_for, jobset_of())
    request = restart_of(launch)
    before = launcher.observe(request)
    stages = [before]
    while stages[-1].state in ("ready", "begun"):
        launcher.begin(request, stages[-1])
        stages.append(launcher.observe(request))
    writes, pods = list(cluster.writes), len(cluster.started)
    for stage in stages:
        launcher.begin(request, stage)
    assert (cluster.writes, len(cluster.started)) == (writes, pods)
    assert launcher.observe(request).state == "done"


def test_in_place_only_the_pod_on_the_bad_node_is_deleted(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    job = jobset_of(maxRestarts=3, restartStrategy="InPlaceRestart")
    launch = run(cluster, wait_for, job)
    stayed = {pod["metadata"]["uid"] for pod in cluster.pods() if pod["spec"]["nodeName"] == "n1"}
    done = carry_out(launcher, restart_of(launch, "n0"), wait_for)
    assert done.state == "done", done.detail
    assert stayed < {pod["metadata"]["uid"] for pod in cluster.pods()}
    assert cluster.nodes_of() == {"n1", "n2"}
    assert cluster.writes.count("delete pods") == 1
    assert launch_of(cluster).restarts == 1
    # Without an excluded node, one pod is enough for a restart of all.
    again = restart_of(launch_of(cluster), action="act-2")
    assert carry_out(launcher, again, wait_for).state == "done"
    assert (cluster.writes.count("delete pods"), launch_of(cluster).restarts) == (2, 2)


def test_in_place_restarts_that_are_used_up_are_replaced_by_a_suspension(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    job = jobset_of(maxRestarts=0, restartStrategy="InPlaceRestart")
    launch = run(cluster, wait_for, job)
    assert carry_out(launcher, restart_of(launch, "n0"), wait_for).state == "done"
    assert "delete pods" not in cluster.writes


@pytest.mark.parametrize("make", [jobset_of, train_job_of])
def test_a_failed_job_is_deleted_and_created_again_once(
    cluster: KubernetesCluster,
    launcher: KubernetesLauncher,
    wait_for: Wait,
    make: Callable[[], dict[str, Any]],
) -> None:
    launch = run(cluster, wait_for, make())
    old = cluster.get("jobsets", "train")
    assert old is not None
    cluster.fail_pod("n1")
    wait_for(lambda: launcher.observe(restart_of(launch, "n1")).content.has_failed, "the failure")
    done = carry_out(launcher, restart_of(launch, "n1"), wait_for)
    assert done.state == "done", done.detail
    new = cluster.get("jobsets", "train")
    assert new is not None
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert cluster.nodes_of() == {"n0", "n2"}
    assert len(cluster.started) == 4
    assert cluster.all("controllerrevisions") == [], "what it was created from is not left behind"
    assert launch_of(cluster).restarts == 1
    if make is jobset_of:
        assert new["metadata"]["labels"] == {"team": "a"}


def test_a_deleted_job_is_created_again_also_after_a_refusal(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    request = restart_of(run(cluster, wait_for, jobset_of()))
    cluster.fail_pod("n1")
    wait_for(lambda: launcher.observe(request).content.has_failed, "the failure")
    cluster.queue_responses.append(("create jobsets", 403))
    for _ in range(2):  # it is stored, then deleted
        launcher.begin(request, launcher.observe(request))
    wait_for(lambda: cluster.get("jobsets", "train") is None, "the deletion")
    with pytest.raises(LauncherError, match="ControllerRevision paceline-act-1 has") as raised:
        launcher.begin(request, launcher.observe(request))
    assert not isinstance(raised.value, LauncherRefusedError), "which would end the request"
    assert carry_out(launcher, request, wait_for).state == "done"


def test_a_restart_by_the_controller_itself_is_not_repeated(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    launch = run(cluster, wait_for, jobset_of(maxRestarts=3))
    cluster.fail_pod("n1")
    wait_for(lambda: len(cluster.started) == 4 and runs(cluster, 2), "its own restart")
    done = carry_out(launcher, restart_of(launch), wait_for)
    assert (done.state, len(cluster.started), cluster.writes) == ("done", 4, [])
    check = replace(restart_of(launch), kind="check")
    assert launcher.observe(check).state == "refused"


def test_jobs_that_others_own_suspend_or_replaced_are_refused(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    launch = run(cluster, wait_for, jobset_of())
    check = replace(restart_of(launch), kind="check")
    assert launcher.observe(check).state == "ready"

    def refusal(request: LaunchRequest = check) -> str:
        seen = launcher.observe(request)
        assert seen.state == "refused", seen
        return seen.detail

    forged = replace(check, launch=replace(launch, nodes={"n3": "n3"}))
    assert "but Kubernetes shows n0, n1" in refusal(forged)
    assert "another one now" in refusal(replace(check, launch=replace(launch, uid="other")))

    def label(obj: dict[str, Any]) -> None:
        obj["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"

    cluster.change("jobsets", "train", label)
    assert "Kueue's queue gpus" in refusal()
    cluster.change("jobsets", "train", lambda obj: obj["metadata"].pop("labels"))

    def manage(obj: dict[str, Any]) -> None:
        obj["spec"]["managedBy"] = "example.com/other"

    cluster.change("jobsets", "train", manage)
    assert "managed by example.com/other" in refusal()
    cluster.change("jobsets", "train", lambda obj: obj["spec"].pop("managedBy"))
    owner = {"kind": "Workflow", "apiVersion": "argoproj.io/v1alpha1", "controller": True}

    def own(obj: dict[str, Any]) -> None:
        obj["metadata"]["ownerReferences"] = [owner]

    cluster.change("jobsets", "train", own)
    with pytest.raises(LauncherRefusedError, match="belongs to a Workflow"):
        launcher.observe(check)
    cluster.change("jobsets", "train", lambda obj: obj["metadata"].pop("ownerReferences"))
    cluster.change("jobsets", "train", lambda obj: obj["spec"].update(suspend=True))
    assert "is suspended" in refusal()
    with cluster.lock:
        del cluster.objects["jobsets", NAMESPACE, "train"]
    gone = launcher.observe(check)
    assert (gone.state, "no JobSet training/train" in gone.detail) == ("over", True)
    assert cluster.writes == []


def test_a_job_that_another_client_suspends_or_deletes_meanwhile_is_left_alone(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    launch = run(cluster, wait_for, jobset_of())
    request = restart_of(launch)
    assert carry_out(launcher, request, wait_for).state == "done"
    cluster.change("jobsets", "train", lambda obj: obj["spec"].update(suspend=True))
    seen = launcher.observe(request)
    assert (seen.state, "Another client has suspended" in seen.detail) == ("refused", True)
    cluster.change("jobsets", "train", lambda obj: obj["metadata"].update(deletionTimestamp="now"))
    assert launcher.observe(request).state == "over"


def test_a_job_that_another_client_creates_again_after_the_deletion_is_not_touched(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    launch = run(cluster, wait_for, jobset_of())
    cluster.fail_pod("n1")
    request = restart_of(launch)
    wait_for(lambda: launcher.observe(request).content.has_failed, "the failure")
    for _ in range(2):  # it is stored, then deleted
        launcher.begin(request, launcher.observe(request))
    wait_for(lambda: cluster.get("jobsets", "train") is None, "the deletion")
    run(cluster, wait_for, jobset_of())
    seen = carry_out(launcher, request, wait_for)
    assert (seen.state, "Another client has created" in seen.detail) == ("refused", True)
    assert len(cluster.started) == 4


def test_a_job_that_trains_is_restarted_only_if_it_gets_nodes(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    launch = run(cluster, wait_for, jobset_of())
    check = replace(restart_of(launch, "n0"), kind="check", is_training=True)
    assert launcher.observe(check).state == "ready"
    cluster.change("nodes", "n2", lambda obj: obj["spec"].update(unschedulable=True), "")
    cluster.change(
        "nodes",
        "n3",
        lambda obj: obj["spec"].update(taints=[{"key": "gpu", "effect": "NoSchedule"}]),
        "",
    )
    seen = launcher.observe(check)
    assert (seen.state, "no free node to replace n0" in seen.detail) == ("refused", True)
    assert launcher.observe(replace(check, is_training=False)).state == "ready"
    assert launcher.observe(replace(check, exclude=[])).state == "ready"
    cluster.uncordon("n2")
    cluster.put("jobsets", jobset_of("waiting", pods=3))
    wait_for(lambda: any(p["status"].get("conditions") for p in cluster.pods("waiting")), "a pod")
    seen = launcher.observe(check)
    assert (seen.state, "wait for nodes" in seen.detail) == ("refused", True)
    assert cluster.writes == []


def test_a_job_without_free_nodes_waits_and_shows_the_schedulers_reason(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    launch = run(cluster, wait_for, jobset_of(pods=4), pods=4)
    request = restart_of(launch, "n0")

    def waits() -> bool:
        seen = launcher.observe(request)
        launcher.begin(request, seen)
        return "0/4 nodes are available" in seen.detail and seen.state == "begun"

    wait_for(waits, "the scheduler's reason")
    cluster.uncordon("n0")  # a person finds nothing wrong with it
    seen = launcher.observe(replace(request, exclude=[]))
    wait_for(lambda: launcher.observe(replace(request, exclude=[])).state == "done", "the pods")
    assert seen.state in ("begun", "done")


def test_a_node_that_a_person_uncordons_meanwhile_is_not_cordoned_again(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    request = restart_of(run(cluster, wait_for, jobset_of(pods=4), pods=4), "n0")

    def waits() -> bool:
        seen = launcher.observe(request)
        launcher.begin(request, seen)
        return "0/4 nodes are available" in seen.detail

    wait_for(waits, "the scheduler's reason")
    cluster.uncordon("n0")
    for _ in range(3):
        launcher.begin(request, launcher.observe(request))
    assert "unschedulable" not in cluster.node("n0")["spec"]
    wait_for(lambda: runs(cluster, 4), "the pods")


def test_pods_of_a_lost_node_do_not_hold_up_the_restart(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    launch = run(cluster, wait_for, jobset_of())
    cluster.keeps_deleted_pods = True
    request = restart_of(launch, "n0", "n1")
    assert carry_out(launcher, request, wait_for).state == "done"
    assert len(cluster.started) == 4


@pytest.mark.parametrize("policy", [{}, {"maxRestarts": 3, "restartStrategy": "InPlaceRestart"}])
def test_a_node_that_was_lost_before_does_not_hold_up_a_later_restart(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait, policy: dict[str, Any]
) -> None:
    """Its pod is shown as leaving until the node is back, while the job runs without it."""
    launch = run(cluster, wait_for, jobset_of(**policy))
    with cluster.lock:
        (pod,) = [one for one in cluster.pods() if one["spec"]["nodeName"] == "n0"]
        metadata = {**pod["metadata"], "name": "a-lost-one", "uid": "lost"}
        metadata["labels"] = {**metadata["labels"], UID: "of no controller here"}
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        cluster.put("pods", {**pod, "metadata": metadata, "spec": {"nodeName": "n3"}})
    done = carry_out(launcher, restart_of(launch), wait_for)
    assert done.state == "done", done.detail


def test_devices_of_a_node_may_be_written_with_a_suffix(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    job = jobset_of()
    (replicated,) = job["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": 8, "rdma/hca": "1"}}
    offered = {"nvidia.com/gpu": "8", "rdma/hca": "1k"}
    for node in ("n0", "n1", "n2", "n3"):
        cluster.change("nodes", node, lambda obj: obj["status"].update(allocatable=offered), "")
    check = replace(restart_of(run(cluster, wait_for, job), "n0"), kind="check", is_training=True)
    assert launcher.observe(check).state == "ready"


class TestErrors:
    """Each status, a server that hangs, and one that dies in the middle of its answer."""

    def test_each_is_one_sentence_of_the_right_kind(
        self,
        cluster: KubernetesCluster,
        launcher: KubernetesLauncher,
        hasty: KubernetesLauncher,
        wait_for: Wait,
    ) -> None:
        request = restart_of(run(cluster, wait_for, jobset_of()))
        for fault, error, text in (
            (401, LauncherError, "refuses the server's token"),
            (403, LauncherRefusedError, "server-rbac.yaml has the rights"),
            (410, LauncherUnavailableError, "answered GET .* with 410"),
            (404, LauncherUnavailableError, "Something before Kubernetes' API .* with 404"),
            (422, LauncherRefusedError, r"refuses GET .* \(422\)"),
            (429, LauncherUnavailableError, "with 429: fault 429"),
            (500, LauncherUnavailableError, "with 500"),
            ("hang", LauncherUnavailableError, "does not answer GET .*/jobsets/train"),
            ("cut", LauncherUnavailableError, "does not answer GET"),
        ):
            cluster.queue_responses.append(("get jobsets", fault))
            with pytest.raises(error, match=text) as raised:
                (hasty if fault == "hang" else launcher).observe(request)
            assert type(raised.value) is error
        assert launcher.observe(request).state == "ready"

    @pytest.mark.parametrize("fault", [401, 409, 429, 500, "hang", "cut"])
    def test_after_each_the_request_is_carried_out_once(
        self,
        cluster: KubernetesCluster,
        launcher: KubernetesLauncher,
        hasty: KubernetesLauncher,
        wait_for: Wait,
        fault: int | str,
    ) -> None:
        backend = hasty if fault == "hang" else launcher
        request = restart_of(run(cluster, wait_for, jobset_of()), "n0")
        calls = ("patch nodes", "patch jobsets", "get jobsets", "list pods", "patch jobsets")
        cluster.queue_responses += [
            (call, fault) for call in calls if "patch" in call or fault != 409
        ]

        def is_done() -> bool:
            try:
                seen = backend.observe(request)
                if seen.state == "done":
                    return True
                assert seen.state in ("ready", "begun"), seen
                backend.begin(request, seen)
            except LauncherRefusedError:
                raise
            except LauncherError:
                return False
            return False

        wait_for(is_done, "the restart")
        assert (cluster.queue_responses, len(cluster.started)) == ([], 4)
        assert cluster.nodes_of() == {"n1", "n2"}

    def test_without_the_rights_nothing_is_stopped(
        self, cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
    ) -> None:
        request = restart_of(run(cluster, wait_for, jobset_of()), "n0")
        cluster.revoke("nodes", "patch")
        with pytest.raises(LauncherRefusedError, match="may not PATCH /api/v1/nodes/n0"):
            launcher.begin(request, launcher.observe(request))
        assert cluster.writes == []

    def test_a_token_that_was_replaced_is_read_again(
        self, cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
    ) -> None:
        request = restart_of(run(cluster, wait_for, jobset_of()))
        assert launcher.observe(request).state == "ready"
        cluster.token = "token-2"
        with pytest.raises(LauncherError, match="refuses the server's token"):
            launcher.observe(request)
        (cluster.credentials / "token").write_text("token-2")
        assert launcher.observe(request).state == "ready"

    def test_without_credentials_or_a_server_the_error_says_what_to_do(
        self, cluster: KubernetesCluster, tmp_path: Path, wait_for: Wait
    ) -> None:
        request = restart_of(run(cluster, wait_for, jobset_of()))
        without = KubernetesLauncher(KubernetesApi(cluster.url, tmp_path / "none"))
        with pytest.raises(LauncherRefusedError, match="has no token for Kubernetes"):
            without.observe(request)
        away = KubernetesLauncher(KubernetesApi("http://127.0.0.1:9", cluster.credentials))
        with pytest.raises(LauncherUnavailableError, match="does not answer"):
            away.observe(request)

    def test_an_answer_that_is_not_an_object_is_an_error(
        self, cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
    ) -> None:
        request = restart_of(run(cluster, wait_for, jobset_of()))
        cluster.change("jobsets", "train", lambda obj: obj["spec"].update(suspend="maybe"))
        with pytest.raises(LauncherError, match="is not valid"):
            launcher.observe(request)


def test_long_lists_are_read_in_parts(
    cluster: KubernetesCluster, launcher: KubernetesLauncher, wait_for: Wait
) -> None:
    request = restart_of(run(cluster, wait_for, jobset_of()))
    (pod, *_) = cluster.all("pods")
    for number in range(1200):
        name = f"old-{number}"
        metadata = {**pod["metadata"], "name": name, "uid": name}
        cluster.put("pods", {**pod, "metadata": metadata, "status": {"phase": "Succeeded"}})
    assert len(launcher.observe(request).content.pods) == 1202
