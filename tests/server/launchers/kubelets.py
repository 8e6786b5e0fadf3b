"""The kubelets of a `KubernetesCluster`: real processes in place of containers."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes_cluster import IN_PLACE, UID, KubernetesCluster, Object

MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/jobset.yaml"
_GRACE_SECONDS = 30.0


@dataclass
class _Container:
    process: subprocess.Popen[bytes]
    in_place: str  # the restart in place that it belongs to
    kill_at: float = 0.0  # when SIGKILL follows SIGTERM; 0: it was not asked to end


class Kubelets:
    """Run a process for each pod that has a node, with the variables of deploy/'s manifest.

    A pod that is deleted is gone once its process has ended.
    """

    def __init__(
        self, cluster: KubernetesCluster, command: list[str], variables: dict[str, str], log: Path
    ) -> None:
        """`variables`: of each process; `{node}` in a value stands for its node."""
        cluster.keeps_deleted_pods = True
        self._cluster, self._command, self._variables = cluster, command, variables
        self._log = log
        self._containers: dict[str, _Container] = {}  # by uid of the pod
        job = yaml.safe_load(MANIFEST.read_text())["spec"]["replicatedJobs"][0]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        self._environment: list[dict[str, Any]] = container["env"]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Kill all processes."""
        self._stop.set()
        self._thread.join()
        for container in self._containers.values():
            container.process.kill()
            container.process.wait()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            with self._cluster.lock:
                pods = {pod["metadata"]["uid"]: pod for pod in self._cluster.all("pods")}
                for uid, pod in pods.items():
                    self._serve(uid, pod)

    def _serve(self, uid: str, pod: Object) -> None:
        metadata, container = pod["metadata"], self._containers.get(uid)
        is_deleted = "deletionTimestamp" in metadata
        in_place = metadata["annotations"].get(IN_PLACE, "0")
        if container is None:
            if is_deleted:
                self._remove(pod)
            elif pod["status"]["phase"] == "Running":
                self._containers[uid] = _Container(self._start(pod), in_place)
        elif (code := container.process.poll()) is None:
            if is_deleted or container.in_place != in_place:
                _end(container)
        elif is_deleted:
            del self._containers[uid]
            self._remove(pod)
        elif container.in_place != in_place:
            self._containers[uid] = _Container(self._start(pod), in_place)
        elif pod["status"]["phase"] == "Running":
            pod["status"]["phase"] = "Failed" if code else "Succeeded"
            self._cluster.put("pods", pod)

    def _remove(self, pod: Object) -> None:
        metadata = pod["metadata"]
        self._cluster.objects.pop(("pods", metadata["namespace"], metadata["name"]), None)

    def _start(self, pod: Object) -> subprocess.Popen[bytes]:
        node, annotations = pod["spec"]["nodeName"], pod["metadata"]["annotations"]
        found = {one["name"]: one.get("value") or _field(pod, one) for one in self._environment}
        found |= {name: value.format(node=node) for name, value in self._variables.items()}
        found["TEST_NODE"] = node
        found["RANK"] = found["TEST_RANK"] = annotations["index"].rpartition("-")[2]
        counts = (value for name, value in found.items() if "RESTART" in name)
        found["TEST_RUN"] = f"{pod['metadata']['labels'][UID]}-{sum(int(c or 0) for c in counts)}"
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, env=found, stdout=log, stderr=log)


def _end(container: _Container) -> None:
    """Ask the process to end; kill it after the time that a pod has."""
    if not container.kill_at:
        container.process.terminate()
        container.kill_at = time.monotonic() + _GRACE_SECONDS
    elif time.monotonic() > container.kill_at:
        container.process.kill()


def _field(pod: Object, variable: dict[str, Any]) -> str:
    """Return what a `fieldRef` stands for; empty if the pod has no such label or annotation."""
    path: str = variable["valueFrom"]["fieldRef"]["fieldPath"]
    place, _, key = path.partition("['")
    found: Any = pod
    for part in place.split("."):
        found = found[part]
    return str(found.get(key.removesuffix("']"), "") if key else found)
