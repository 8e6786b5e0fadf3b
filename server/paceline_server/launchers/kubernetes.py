"""Kubernetes: cordon the excluded nodes, then restart a JobSet, or the TrainJob that owns it.

A job that has not failed is suspended and resumed: its controller deletes all pods and creates new
ones. The object stays, and its limit of restarts is not used up. With the strategy InPlaceRestart,
only the pods on excluded nodes are deleted, and the controller restarts the others in their place.
A job that has failed for good is deleted and created again; meanwhile a ControllerRevision has it.

The first write of each way marks the object with the action's id, under its resourceVersion. It
happens only while the object is unmarked and its number of restarts is that of the decision. So the
API server itself refuses a second restart, and a request that arrives late.

A rank can report any job and node. So a launch is recognized only if each node has the name of the
agent that found the ranks there, and a job is restarted only if its pods are on these nodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Self

import msgspec
from msgspec.structs import replace

from paceline_server.decide.types import LaunchRequest
from paceline_server.engine.types import Launch
from paceline_server.launchers.contract import (
    LauncherError,
    LauncherParts,
    LauncherRefusedError,
    ObservedState,
    ShownRequest,
)
from paceline_server.launchers.kubernetes_api import (
    IN_CLUSTER_CREDENTIALS,
    IN_CLUSTER_URL,
    KubernetesApi,
    Metadata,
)
from paceline_wire.metadata import (
    KUBERNETES_JOB,
    KUBERNETES_NODE,
    KUBERNETES_RESTARTS,
    KUBERNETES_UID,
)

# Annotations of the job: the last action, and whether it was resumed; the number of restarts that
# Paceline asked for, also of its pods; the pods that are deleted for a restart in place.
_ACTION, _RESUMED = "paceline/action", "paceline/resumed"
_RESTARTS, _PODS = "paceline/restarts", "paceline/pods"
_REASON = "paceline/reason"  # annotation of nodes, beside the action's id

_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
_QUEUE = "kueue.x-k8s.io/queue-name"
_CONTROLLERS = (
    "",
    "jobset.sigs.k8s.io/jobset-controller",
    "trainer.kubeflow.org/trainjob-controller",
)
_APIS = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
_JOB = re.compile("[a-z0-9-]{1,63}/[a-z0-9][a-z0-9.-]{0,62}")  # namespace and name
_NODE = re.compile("[a-z0-9][a-z0-9.-]{0,252}")
_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9}  # suffixes of a number of devices
_REASON_CHARACTERS = 200


class _Conditions(msgspec.Struct, frozen=True, rename="camel"):
    conditions: list[dict[str, Any]] = []
    restarts: int = 0
    restarts_count_towards_max: int = 0
    current_in_place_restart_attempt: int | None = None

    def has(self, kind: str) -> bool:
        """Return whether a condition of this type is true."""
        return any(
            one.get("type") == kind and one.get("status") == "True" for one in self.conditions
        )

    def message(self, kind: str) -> str:
        found = (one.get("message") or one.get("reason") for one in self.conditions)
        types = (one.get("type") for one in self.conditions)
        return next((str(text) for of, text in zip(types, found, strict=True) if of == kind), "")


class _FailurePolicy(msgspec.Struct, frozen=True, rename="camel"):
    max_restarts: int = 0
    restart_strategy: str = "Recreate"


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    """Fields of a JobSet and a TrainJob; each has its part of them."""

    suspend: bool | None = None
    managed_by: str | None = None
    failure_policy: _FailurePolicy | None = None
    replicated_jobs: list[dict[str, Any]] = []


class _Object(msgspec.Struct, frozen=True):
    """A JobSet or a TrainJob."""

    kind: str
    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Conditions = msgspec.field(default_factory=_Conditions)

    @property
    def path(self) -> str:
        return _path(self.kind, self.metadata.namespace, self.metadata.name)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.metadata.namespace}/{self.metadata.name}"


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    containers: list[dict[str, Any]] = []


class _PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    conditions: list[dict[str, Any]] = []


class _Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def is_live(self) -> bool:
        return self.status.phase not in ("Succeeded", "Failed")

    @property
    def is_leaving(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def waits_because(self) -> str | None:
        """The scheduler's message about a pod without a node."""
        unscheduled = (
            str(one.get("message", "it has no node yet"))
            for one in self.status.conditions
            if one.get("type") == "PodScheduled" and one.get("status") == "False"
        )
        return next(unscheduled, None)


class _NodeSpec(msgspec.Struct, frozen=True):
    unschedulable: bool = False
    taints: list[dict[str, Any]] = []


class _NodeStatus(msgspec.Struct, frozen=True):
    conditions: list[dict[str, Any]] = []
    allocatable: dict[str, str] = {}


class _ClusterNode(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class _Revision(msgspec.Struct, frozen=True):
    """A ControllerRevision: what a job is created again from."""

    metadata: Metadata
    data: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.data["kind"])

    @property
    def uid(self) -> str:
        """The uid of the job that is deleted."""
        return self.metadata.annotations.get("paceline/uid", "")


class _ShownJob(msgspec.Struct, frozen=True, kw_only=True):
    """All that Kubernetes shows of one job."""

    target: _Object | None  # what is restarted: the JobSet, or the TrainJob that owns it
    jobset: _Object | None
    pods: list[_Pod]
    revision: _Revision | None

    @property
    def restarts(self) -> int:
        """How often the job was restarted, as the ranks of its pods count it."""
        asked = 0 if self.target is None else _count(self.target.metadata.annotations)
        return asked + self.counted_by_controller

    @property
    def counted_by_controller(self) -> int:
        status = _Conditions() if self.jobset is None else self.jobset.status
        return status.restarts + (status.current_in_place_restart_attempt or 0)

    @property
    def has_failed(self) -> bool:
        shown = (one for one in (self.target, self.jobset) if one is not None)
        return any(one.status.has("Failed") for one in shown)

    @property
    def is_complete(self) -> bool:
        return self.jobset is not None and self.jobset.status.has("Completed")

    @property
    def live_pods(self) -> list[_Pod]:
        return [pod for pod in self.pods if pod.is_live]

    @property
    def expected_pods(self) -> int:
        """The number of pods of all replicated jobs."""
        if self.jobset is None:
            return 0
        return sum(
            int(one.get("replicas", 1)) * int(one["template"]["spec"].get("parallelism") or 1)
            for one in self.jobset.spec.replicated_jobs
        )

    @property
    def restarts_in_place(self) -> bool:
        """Whether the controller restarts pods in place, and its limit allows it once more."""
        policy = None if self.jobset is None else self.jobset.spec.failure_policy
        if self.jobset is None or policy is None or policy.restart_strategy != "InPlaceRestart":
            return False
        status = self.jobset.status
        attempt = status.current_in_place_restart_attempt
        if attempt is None:  # the feature gate is off: no agent has counted
            return False
        uncounted = status.restarts - status.restarts_count_towards_max
        return attempt + 1 - uncounted <= policy.max_restarts


class KubernetesLauncher:
    """The backend; it uses the API with the rights of the server's service account."""

    name: ClassVar[str] = "kubernetes"

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    @classmethod
    def create(cls, parts: LauncherParts) -> Self:
        """Return the backend; it reads its credentials when it is first used."""
        settings = parts.settings
        return cls(
            KubernetesApi(
                settings.kubernetes_url or IN_CLUSTER_URL,
                settings.kubernetes_credentials or IN_CLUSTER_CREDENTIALS,
            )
        )

    def close(self) -> None:
        self._api.close()

    @classmethod
    def recognize(cls, metadata: Mapping[str, Mapping[str, str]]) -> Launch | None:
        """Return the launch of ranks that all report the same JobSet and number of restarts."""
        keys = (KUBERNETES_JOB, KUBERNETES_UID, KUBERNETES_RESTARTS)
        runs = {tuple(one.get(key) for key in keys) for one in metadata.values()}
        nodes = {agent: one.get(KUBERNETES_NODE, "") for agent, one in metadata.items()}
        if len(runs) != 1 or not all(_is_same_node(*pair) for pair in nodes.items()):
            return None
        job, uid, restarts = runs.pop()
        if not (job and _JOB.fullmatch(job) and restarts and restarts.isdecimal()):
            return None
        return Launch(launcher=cls.name, job=job, uid=uid, restarts=int(restarts), nodes=nodes)

    # --- observe ---------------------------------------------------------------------------

    def observe(self, request: LaunchRequest) -> ShownRequest:
        """Return how far the request is. Raises LauncherError."""
        job, name = self._job(request), request.launch.job
        target = job.target
        if target is None:
            if job.revision is not None:
                return _seen("begun", f"{job.revision.kind} {name} is deleted.", job)
            return _seen("over", f"Kubernetes has no JobSet {name} any longer.", job)
        if target.metadata.annotations.get(_ACTION) == request.action_id:
            return replace(self._observe_marked(request, job, target), has_effect=True)
        if job.revision is not None and target.metadata.uid != job.revision.uid:
            detail = f"Another client has created {target.title} again."
            return _seen("refused", detail, job)
        if target.metadata.deletion_timestamp is not None:
            state: ObservedState = "over" if job.revision is None else "begun"
            return _seen(state, f"Kubernetes deletes {target.title}.", job)
        if (obstacle := _obstacle(target)) is not None:
            return _seen("refused", obstacle, job)
        if _is_another(request.launch, job):
            detail = f"JobSet {name} is another one now: it was deleted and created again."
            return _seen("refused", detail, job)
        count = job.restarts - request.launch.restarts
        if count == 0:
            return self._observe_before(request, job, target)
        if count < 0 or request.kind == "check" or count > 1:
            detail = (
                f"Expected {target.title} with {request.launch.restarts} restarts, found "
                f"{job.restarts}: it was restarted meanwhile."
            )
            return _seen("refused", detail, job)
        return replace(self._observe_after(request, job, target), has_effect=True)

    def _observe_before(
        self, request: LaunchRequest, job: _ShownJob, target: _Object
    ) -> ShownRequest:
        """Return the observation of a job that was not restarted since the decision."""
        if job.is_complete:
            return _seen("refused", f"{target.title} has completed.", job)
        if target.spec.suspend:
            return _seen("refused", f"{target.title} is suspended.", job)
        claimed = set(request.launch.nodes.values())
        shown = {pod.spec.node_name for pod in job.pods if pod.spec.node_name}
        # Pods of an earlier run stay on a lost node until it is back.
        left = {pod.spec.node_name for pod in job.pods if not pod.is_leaving} - {""}
        # A controller deletes the pods that ran beside a failed one.
        is_theirs = left <= claimed and (job.has_failed or claimed <= shown)
        if not is_theirs or not (shown or request.launch.uid):
            detail = (
                f"The ranks report that they run on {_names(claimed)} in {target.title}, but "
                f"Kubernetes shows {_names(shown)}: it is not restarted for them."
            )
            return _seen("refused", detail, job)
        if job.restarts_in_place and not job.has_failed and not self._in_place(request, job):
            detail = f"{target.title} has no pod on {_names(request.exclude)}."
            return _seen("refused", detail, job)
        if request.kind == "check" and request.is_training:
            shortage = self._shortage(request, job)
            if shortage is not None:
                return _seen("refused", shortage, job)
        return _seen("ready", f"Kubernetes can restart {target.title}.", job)

    def _observe_marked(
        self, request: LaunchRequest, job: _ShownJob, target: _Object
    ) -> ShownRequest:
        """Return the observation of a job that has this action's mark."""
        marks = target.metadata.annotations
        if target.metadata.deletion_timestamp is not None:
            return _seen("over", f"{target.title} was deleted after its restart.", job)
        if target.spec.suspend and marks.get(_RESUMED) == request.action_id:
            detail = f"Another client has suspended {target.title} after its restart."
            return _seen("refused", detail, job)
        if target.spec.suspend:
            left = len(_ending(request, job))
            detail = f"{target.title} is suspended; {left} of its pods have to end."
            return _seen("begun", detail, job)
        return self._observe_after(request, job, target)

    def _observe_after(
        self, request: LaunchRequest, job: _ShownJob, target: _Object
    ) -> ShownRequest:
        """Return the observation of a job that was restarted once since the decision."""
        if job.is_complete or job.has_failed:
            how = "Completed" if job.is_complete else "Failed"
            detail = f"{target.title} is {how} after its restart"
            message = target.status.message(how)
            return _seen("refused", f"{detail}: {message}" if message else f"{detail}.", job)
        old = _uids(target)
        attempt = "0" if job.jobset is None else str(job.jobset.status.restarts)
        current = [
            pod
            for pod in job.pods
            if pod.metadata.labels.get(_ATTEMPT, attempt) == attempt
            and pod.metadata.uid not in old
            and not pod.is_leaving
        ]
        running = [pod for pod in current if pod.status.phase in ("Running", "Succeeded")]
        is_on = {pod.spec.node_name for pod in current if pod.is_live} - {""}
        if (wrong := is_on & set(request.exclude)) and job.revision is None:
            detail = f"Kubernetes runs {target.title} on {_names(wrong)} again."
            return _seen("refused", detail, job)
        has_restarted = job.restarts > request.launch.restarts
        if has_restarted and 0 < job.expected_pods <= len(running):
            if job.revision is not None:
                return _seen("begun", f"Kubernetes runs {target.title} again.", job)
            detail = f"Kubernetes runs {target.title} again, on {_names(is_on)}."
            return _seen("done", detail, job)
        waits = next((text for pod in current if (text := pod.waits_because)), None)
        detail = f"{target.title}: {len(running)} of {job.expected_pods} pods run"
        return _seen("begun", f"{detail}; {waits}" if waits else f"{detail}.", job)

    def _shortage(self, request: LaunchRequest, job: _ShownJob) -> str | None:
        """Return why a job that trains might wait for nodes if it were restarted now.

        Pods of other namespaces are not visible with the server's rights, so a node that they use
        up may be taken for a free one.
        """
        namespace = request.launch.job.partition("/")[0]
        pods = self._api.items(f"/api/v1/namespaces/{namespace}/pods", _Pod)
        if any(pod.waits_because for pod in pods):
            return (
                f"Other pods of namespace {namespace} wait for nodes, and could get those of "
                f"{request.launch.job} while it is restarted."
            )
        if not request.exclude:
            return None
        busy = {pod.spec.node_name for pod in pods if pod.is_live}
        moved = (pod.spec for pod in job.live_pods if pod.spec.node_name in request.exclude)
        pod = next(moved, _PodSpec())
        nodes = self._api.items("/api/v1/nodes", _ClusterNode)
        free = [node for node in nodes if node.metadata.name not in busy and _takes(node, pod)]
        if len(free) < len(request.exclude):
            return f"Kubernetes has no free node to replace {_names(request.exclude)}."
        return None

    def _job(self, request: LaunchRequest) -> _ShownJob:
        """Return the job as it is now. Raises LauncherError."""
        namespace, name = request.launch.job.split("/", 1)
        jobset = self._api.get(_path("JobSet", namespace, name), _Object)
        revision = None
        if request.kind == "restart":
            path = _revision_path(namespace, request.action_id)
            revision = self._api.get(path, _Revision)
        owner = None if jobset is None else _owner(jobset.metadata)
        target = jobset
        if owner == "TrainJob" or (revision is not None and revision.kind == "TrainJob"):
            target = self._api.get(_path("TrainJob", namespace, name), _Object)
        elif owner is not None:
            raise LauncherRefusedError(
                f"JobSet {request.launch.job} belongs to a {owner}, which Paceline cannot ask."
            )
        pods = self._api.items(
            f"/api/v1/namespaces/{namespace}/pods", _Pod, labelSelector=f"{_JOBSET_NAME}={name}"
        )
        return _ShownJob(target=target, jobset=jobset, pods=pods, revision=revision)

    # --- begin -----------------------------------------------------------------------------

    def begin(self, request: LaunchRequest, seen: ShownRequest) -> None:
        """Do the next external action, if one is due. Raises LauncherError."""
        job = seen.content
        assert isinstance(job, _ShownJob)
        if self._cordon_next(request):
            return
        target = job.target
        if target is None:
            assert job.revision is not None
            self._create(request, job.revision)
        elif target.metadata.annotations.get(_ACTION) == request.action_id:
            self._continue(request, job, target)
        elif seen.state == "ready" and job.has_failed:
            if job.revision is None:
                self._store(request, target)
            else:
                self._api.delete(target.path, target.metadata)
        elif seen.state == "ready":
            self._mark(request, job, target)

    def _cordon_next(self, request: LaunchRequest) -> bool:
        """Cordon one of the excluded nodes; return whether there was one to cordon."""
        for name in request.exclude:
            node = self._api.get(f"/api/v1/nodes/{name}", _ClusterNode)
            if node is None or node.spec.unschedulable:
                continue
            if node.metadata.annotations.get(_ACTION) == request.action_id:
                continue  # a person has uncordoned it since
            reason = f"Paceline {request.action_id}: {request.reason}"
            reason = "".join(filter(str.isprintable, reason))[:_REASON_CHARACTERS]
            annotations = {_ACTION: request.action_id, _REASON: reason}
            body = {"metadata": {"annotations": annotations}, "spec": {"unschedulable": True}}
            self._api.merge(f"/api/v1/nodes/{name}", node.metadata, body)
            return True
        return False

    def _mark(self, request: LaunchRequest, job: _ShownJob, target: _Object) -> None:
        """Begin the restart: this write happens once."""
        annotations: dict[str, str | None] = {_ACTION: request.action_id, _RESUMED: None}
        if job.restarts_in_place:
            annotations[_PODS] = ",".join(self._in_place(request, job))
            self._api.merge(
                target.path, target.metadata, {"metadata": {"annotations": annotations}}
            )
            return
        annotations[_RESTARTS] = str(_count(target.metadata.annotations) + 1)
        annotations[_PODS] = None
        body = {"metadata": {"annotations": annotations}, "spec": {"suspend": True}}
        self._api.merge(target.path, target.metadata, body)

    @staticmethod
    def _in_place(request: LaunchRequest, job: _ShownJob) -> list[str]:
        """Return the uids of the pods to delete: those on excluded nodes, or else any one, which
        is enough for a restart of all."""
        live = sorted(job.live_pods, key=lambda pod: pod.metadata.name)
        moved = [pod for pod in live if pod.spec.node_name in request.exclude]
        any_one = [pod for pod in live if not pod.is_leaving][:1]
        return [pod.metadata.uid for pod in (moved if request.exclude else any_one)]

    def _continue(self, request: LaunchRequest, job: _ShownJob, target: _Object) -> None:
        """Do the next step after the mark; each may be repeated."""
        marks, namespace = target.metadata.annotations, target.metadata.namespace
        if target.spec.suspend:
            if job.jobset is None or not job.jobset.spec.suspend or _ending(request, job):
                return
            count = marks.get(_RESTARTS, "0")
            if operations := _template_changes(job.jobset, count):
                self._api.json_patch(job.jobset.path, job.jobset.metadata, operations)
                return
            resumed = {"annotations": {_RESUMED: request.action_id}}
            body = {"metadata": resumed, "spec": {"suspend": False}}
            self._api.merge(target.path, target.metadata, body)
            return
        for pod in job.live_pods:
            if pod.metadata.uid in _uids(target) and not pod.is_leaving:
                path = f"/api/v1/namespaces/{namespace}/pods/{pod.metadata.name}"
                self._api.delete_pod(path, pod.metadata.uid)
                return
        if job.revision is not None:
            path = _revision_path(namespace, request.action_id)
            self._api.delete(path, job.revision.metadata)

    def _store(self, request: LaunchRequest, target: _Object) -> None:
        """Store what the job is created again from, before it is deleted."""
        whole = self._api.get_raw(target.path)
        if whole is None or whole["metadata"].get("uid") != target.metadata.uid:
            return
        old = whole["metadata"]
        marks = {_ACTION: request.action_id, _RESTARTS: str(request.launch.restarts + 1)}
        kept = {
            key: value
            for key, value in old.get("annotations", {}).items()
            if not key.startswith("paceline/")
        }
        metadata = {"name": old["name"], "namespace": old["namespace"], "annotations": kept | marks}
        if "labels" in old:
            metadata["labels"] = old["labels"]
        version, _ = _APIS[target.kind]
        self._api.create(
            _revision_path(target.metadata.namespace),
            {
                "apiVersion": "apps/v1",
                "kind": "ControllerRevision",
                "metadata": {
                    "name": _revision_name(request.action_id),
                    "namespace": target.metadata.namespace,
                    "labels": {"app.kubernetes.io/managed-by": "paceline"},
                    "annotations": {_ACTION: request.action_id, "paceline/uid": old["uid"]},
                },
                "revision": request.launch.restarts + 1,
                "data": {
                    "apiVersion": version,
                    "kind": target.kind,
                    "metadata": metadata,
                    "spec": {**whole["spec"], "suspend": True},
                },
            },
        )

    def _create(self, request: LaunchRequest, revision: _Revision) -> None:
        namespace = request.launch.job.partition("/")[0]
        try:
            self._api.create(_path(revision.kind, namespace), revision.data)
        except LauncherRefusedError as error:  # by a quota, for example; the job must not be lost
            raise LauncherError(
                f"{error} It is repeated; ControllerRevision {revision.metadata.name} has the job."
            ) from None


def _ending(request: LaunchRequest, job: _ShownJob) -> list[_Pod]:
    """Return the pods that a restart waits for. Those of a lost node cannot end while it is away,
    also if it was lost before this run; if their ranks live on, they are reported as ranks of an
    earlier run."""
    nodes = set(request.launch.nodes.values()) - set(request.exclude)
    return [
        pod for pod in job.live_pods if not pod.is_leaving or pod.spec.node_name in {"", *nodes}
    ]


def _template_changes(jobset: _Object, count: str) -> list[dict[str, Any]]:
    """Return the changes after which new pods report this number of restarts."""
    changes = []
    for index, one in enumerate(jobset.spec.replicated_jobs):
        metadata = one["template"]["spec"]["template"].get("metadata") or {}
        annotations = metadata.get("annotations") or {}
        if annotations.get(_RESTARTS) == count:
            continue
        path = f"/spec/replicatedJobs/{index}/template/spec/template/metadata"
        value: Any = {**metadata, "annotations": {**annotations, _RESTARTS: count}}
        changes.append({"op": "add", "path": path, "value": value})
    return changes


def _obstacle(target: _Object) -> str | None:
    """Return why this object is not for Paceline to restart; None: it is."""
    if (target.spec.managed_by or "") not in _CONTROLLERS:
        return f"{target.title} is managed by {target.spec.managed_by}."
    if queue := target.metadata.labels.get(_QUEUE):
        return f"{target.title} is in Kueue's queue {queue}, which alone suspends and resumes it."
    return None


def _is_another(launch: Launch, job: _ShownJob) -> bool:
    """Return whether the ranks were in pods of another JobSet of this name."""
    return bool(launch.uid) and job.jobset is not None and job.jobset.metadata.uid != launch.uid


def _takes(node: _ClusterNode, pod: _PodSpec) -> bool:
    """Return whether the scheduler could place such a pod on the node if that were empty."""
    conditions = {one.get("type"): one.get("status") for one in node.status.conditions}
    if node.spec.unschedulable or conditions.get("Ready") != "True":
        return False
    labels = node.metadata.labels
    if any(labels.get(key) != value for key, value in pod.node_selector.items()):
        return False
    if any(not _tolerates(pod.tolerations, taint) for taint in node.spec.taints):
        return False
    wanted: dict[str, int] = {}
    for container in pod.containers:
        limits = (container.get("resources") or {}).get("limits") or {}
        for resource, amount in limits.items():
            if "/" in resource:  # devices, such as nvidia.com/gpu
                wanted[resource] = wanted.get(resource, 0) + _whole(amount)
    offered = node.status.allocatable
    return all(_whole(offered.get(name, "0")) >= amount for name, amount in wanted.items())


def _whole(quantity: object) -> int:
    """Return a number of devices; Kubernetes writes 1000 as 1k. 0: it is not a whole number."""
    text = str(quantity)
    factor = _SUFFIXES.get(text[-1:], 1)
    number = text[:-1] if factor > 1 else text
    return int(number) * factor if number.isdecimal() else 0


def _tolerates(tolerations: Iterable[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    if taint.get("effect") == "PreferNoSchedule":
        return True

    def matches(one: Mapping[str, Any]) -> bool:
        if one.get("effect") not in (None, "", taint.get("effect")):
            return False
        if one.get("operator") == "Exists":
            return one.get("key") in (None, "", taint.get("key"))
        same_value = (one.get("value") or "") == (taint.get("value") or "")
        return one.get("key") == taint.get("key") and same_value

    return any(map(matches, tolerations))


def _owner(metadata: Metadata) -> str | None:
    """Return the kind of the object's controller; None if it has none."""
    for reference in metadata.owner_references:
        if reference.get("controller"):
            group = str(reference.get("apiVersion", "")).partition("/")[0]
            is_known = group == _APIS["TrainJob"][0].partition("/")[0]
            kind = str(reference.get("kind"))
            return kind if is_known else f"{kind} ({group})"
    return None


def _path(kind: str, namespace: str, name: str = "") -> str:
    version, plural = _APIS[kind]
    path = f"/apis/{version}/namespaces/{namespace}/{plural}"
    return f"{path}/{name}" if name else path


def _revision_name(action_id: str) -> str:
    return f"paceline-{action_id.lower()}"


def _revision_path(namespace: str, action_id: str = "") -> str:
    path = f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"
    return f"{path}/{_revision_name(action_id)}" if action_id else path


def _count(annotations: Mapping[str, str]) -> int:
    text = annotations.get(_RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def _uids(target: _Object) -> set[str]:
    return set(filter(None, target.metadata.annotations.get(_PODS, "").split(",")))


def _is_same_node(agent: str, node: str) -> bool:
    """Return whether the agent has the node's name; one of them may lack the domain."""
    return _NODE.fullmatch(node) is not None and (
        agent == node or agent.partition(".")[0] == node or agent == node.partition(".")[0]
    )


def _seen(state: ObservedState, detail: str, job: _ShownJob) -> ShownRequest:
    return ShownRequest(state=state, detail=detail, content=job)


def _names(nodes: Collection[str]) -> str:
    return ", ".join(sorted(nodes)) or "no node"


LAUNCHER = KubernetesLauncher
