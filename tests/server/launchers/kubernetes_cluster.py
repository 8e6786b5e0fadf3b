"""A small Kubernetes: a real HTTP server with the API's rules, and controllers that act on objects.

It has what the backend relies on: resource versions, uid and version preconditions, merge and JSON
patches, the roles of deploy/kubernetes/server-rbac.yaml, status codes, schemas, the rules of the
JobSet webhook. The controllers of JobSet and Trainer, the scheduler and the kubelets are a thread:
each pass creates missing pods and removes deleted ones. kmock, an emulator on PyPI, has neither
preconditions nor controllers.
"""

from __future__ import annotations

import copy
import http.server
import itertools
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml
from kubernetes_schemas import BY_RESOURCE, DELETE_OPTIONS

Object = dict[str, Any]
NAMESPACE = "training"
RBAC = Path(__file__).parents[3] / "deploy/kubernetes/server-rbac.yaml"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
IN_PLACE = "jobset.sigs.k8s.io/in-place-restart-attempt"
NAME, UID = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"
VERBS = {"PATCH": "patch", "DELETE": "delete", "POST": "create"}
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)(?:/(?P<name>[^/?]+))?"
)


class RefusedError(Exception):
    """A response other than success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesCluster:
    """The cluster. Its objects are read and changed under `lock`."""

    def __init__(self, directory: Path, nodes: int = 4) -> None:
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.started: list[Object] = []  # each pod that was ever started
        self.writes: list[str] = []  # verb and resource of each write that changed something
        self.queue_responses: list[tuple[str, int | str]] = []  # (verb and resource, fault)
        self.on_call: Callable[[str, str], None] = lambda when, call: None
        self.keeps_deleted_pods = False  # as on a node that does not answer
        self._versions = itertools.count(1)
        self._documents = list(yaml.safe_load_all(RBAC.read_text()))
        self._schemas = {
            name: jsonschema_rs.validator_for(schema) for name, schema in BY_RESOURCE.items()
        }
        self._delete_options = jsonschema_rs.validator_for(DELETE_OPTIONS)
        self.credentials = directory / "credentials"
        self.credentials.mkdir(parents=True)
        self.token = "token-1"
        (self.credentials / "token").write_text(self.token)
        for number in range(nodes):
            self.put(
                "nodes",
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": f"n{number}", "namespace": "", "labels": {"pool": "a"}},
                    "spec": {},
                    "status": {
                        "conditions": [{"type": "Ready", "status": "True"}],
                        "allocatable": {"nvidia.com/gpu": "8"},
                    },
                },
            )
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.05,)),
            threading.Thread(target=self._control),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    # --- objects ---------------------------------------------------------------------------

    def put(self, resource: str, obj: Object) -> Object:
        """Store an object with a new version, and a uid if it has none."""
        with self.lock:
            metadata = obj["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata["resourceVersion"] = str(next(self._versions))
            self.objects[resource, metadata.get("namespace", ""), metadata["name"]] = obj
            return obj

    def get(self, resource: str, name: str, namespace: str = NAMESPACE) -> Object | None:
        """Return a copy of an object."""
        with self.lock:
            return copy.deepcopy(self.objects.get((resource, namespace, name)))

    def all(self, resource: str) -> list[Object]:
        with self.lock:
            return [
                copy.deepcopy(obj) for (kind, _, _), obj in self.objects.items() if kind == resource
            ]

    def node(self, name: str) -> Object:
        found = self.get("nodes", name, "")
        assert found is not None
        return found

    def change(
        self, resource: str, name: str, do: Callable[[Object], None], namespace: str = NAMESPACE
    ) -> None:
        """Change an object as a person or a controller does."""
        with self.lock:
            obj = self.objects[resource, namespace, name]
            do(obj)
            self.put(resource, obj)

    def pods(self, name: str = "train") -> list[Object]:
        """Return the live pods of a JobSet."""
        pods = [pod for pod in self.all("pods") if pod["metadata"]["labels"].get(NAME) == name]
        return [pod for pod in pods if _is_live(pod)]

    def nodes_of(self, name: str = "train") -> set[str]:
        return {pod["spec"].get("nodeName", "") for pod in self.pods(name)}

    def uncordon(self, node: str) -> None:
        self.change("nodes", node, lambda obj: obj["spec"].pop("unschedulable", None), "")

    def fail_pod(self, node: str) -> None:
        """End the pod on a node with an error."""
        (pod,) = [one for one in self.pods() if one["spec"].get("nodeName") == node]
        self.change("pods", pod["metadata"]["name"], lambda obj: _set_phase(obj, "Failed"))

    def revoke(self, resource: str, verb: str) -> None:
        """Take a right from the server's roles."""
        for document in self._documents:
            for rule in document.get("rules", []):
                if resource in rule["resources"]:
                    rule["verbs"].remove(verb)

    # --- requests --------------------------------------------------------------------------

    def handle(self, method: str, path: str, query: dict[str, str], kind: str, body: Any) -> Object:
        """Carry out one request. Raises RefusedError."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise RefusedError(404, f"the server could not find {path}")
        group, namespace = found["group"] or "", found["namespace"] or ""
        resource, name = found["resource"], found["name"]
        verb = VERBS.get(method) or ("get" if name else "list")
        self._authorize(group, namespace, resource, verb)
        with self.lock:
            if verb == "list":
                return self._list(resource, namespace, query)
            if verb == "create":
                return self._create(resource, namespace, body)
            key = (resource, namespace, str(name))
            if key not in self.objects:
                raise RefusedError(404, f'{resource} "{name}" not found')
            if verb == "get":
                return self.objects[key]
            if verb == "patch":
                return self._patch(key, kind, body)
            return self._delete(key, body)

    def _authorize(self, group: str, namespace: str, resource: str, verb: str) -> None:
        roles = {d["metadata"]["name"]: d for d in self._documents if d["kind"] == "ClusterRole"}
        for binding in self._documents:
            if binding["kind"] not in ("ClusterRoleBinding", "RoleBinding"):
                continue
            within = binding["metadata"].get("namespace", namespace)
            rules = roles[binding["roleRef"]["name"]]["rules"]
            if within == namespace and any(
                group in rule["apiGroups"]
                and resource in rule["resources"]
                and verb in rule["verbs"]
                for rule in rules
            ):
                return
        raise RefusedError(403, f"cannot {verb} resource {resource} in namespace {namespace!r}")

    def _list(self, resource: str, namespace: str, query: dict[str, str]) -> Object:
        key, _, value = query.get("labelSelector", "").partition("=")
        items = [
            obj
            for (kind, within, _), obj in sorted(self.objects.items())
            if kind == resource
            and within == namespace
            and (not key or obj["metadata"].get("labels", {}).get(key) == value)
        ]
        begin, limit = int(query.get("continue", "0")), int(query.get("limit", "500"))
        more = {"continue": str(begin + limit)} if begin + limit < len(items) else {}
        return {"kind": "List", "metadata": more, "items": items[begin : begin + limit]}

    def _create(self, resource: str, namespace: str, obj: Object) -> Object:
        key = (resource, namespace, obj["metadata"]["name"])
        if key in self.objects:
            raise RefusedError(409, f'{resource} "{key[2]}" already exists')
        if "uid" in obj["metadata"] or "resourceVersion" in obj["metadata"]:
            raise RefusedError(400, "resourceVersion should not be set on objects to be created")
        self._validate(resource, obj)
        self.writes.append(f"create {resource}")
        return self.put(resource, copy.deepcopy(obj))

    def _patch(self, key: tuple[str, str, str], kind: str, body: Any) -> Object:
        before = self.objects[key]
        after = copy.deepcopy(before)
        if kind == "application/merge-patch+json":
            after = _merged(after, body)
            for field in ("uid", "resourceVersion"):
                if after["metadata"].get(field) != before["metadata"][field]:
                    raise RefusedError(409, f"the object has been modified: {field} differs")
        elif kind == "application/json-patch+json":
            for operation in body:
                _apply(after, operation)
        else:
            raise RefusedError(415, f"{kind} is not supported")
        self._validate(key[0], after)
        _check_immutable(key[0], before, after)
        self.writes.append(f"patch {key[0]}")
        return self.put(key[0], after)

    def _delete(self, key: tuple[str, str, str], options: Object | None) -> Object:
        options = options or {}
        _raise_for(self._delete_options, options)
        obj = self.objects[key]
        for field, value in options.get("preconditions", {}).items():
            if obj["metadata"][field] != value:
                raise RefusedError(409, f"precondition failed: {field}")
        if "deletionTimestamp" in obj["metadata"]:
            return obj
        self.writes.append(f"delete {key[0]}")
        if key[0] in ("pods", "jobsets", "trainjobs"):
            obj["metadata"]["deletionTimestamp"] = _now()
            return self.put(key[0], obj)
        return self.objects.pop(key)

    def _validate(self, resource: str, obj: Object) -> None:
        if (schema := self._schemas.get(resource)) is not None:
            _raise_for(schema, obj)

    # --- controllers -----------------------------------------------------------------------

    def _control(self) -> None:
        while not self._stop.wait(0.01):
            with self.lock:
                for train_job in self._of("trainjobs"):
                    self._reconcile_train_job(train_job)
                for jobset in self._of("jobsets"):
                    self._reconcile(jobset)
                self._schedule()

    def _of(self, resource: str) -> list[Object]:
        return [obj for (kind, _, _), obj in list(self.objects.items()) if kind == resource]

    def _reconcile_train_job(self, train_job: Object) -> None:
        metadata = train_job["metadata"]
        key = ("jobsets", metadata["namespace"], metadata["name"])
        jobset = self.objects.get(key)
        if "deletionTimestamp" in metadata:
            if jobset is None:
                del self.objects["trainjobs", *key[1:]]
            elif "deletionTimestamp" not in jobset["metadata"]:
                jobset["metadata"]["deletionTimestamp"] = _now()
                self.put("jobsets", jobset)
            return
        suspend = train_job["spec"].get("suspend", False)
        if jobset is None:
            made = jobset_of(metadata["name"], train_job["spec"]["trainer"]["numNodes"])
            made["spec"]["suspend"] = suspend
            owner = {"kind": "TrainJob", "name": metadata["name"], "uid": metadata["uid"]}
            owner |= {"apiVersion": train_job["apiVersion"], "controller": True}
            made["metadata"]["ownerReferences"] = [owner]
            self.put("jobsets", made)
        elif jobset["spec"].get("suspend", False) != suspend:
            jobset["spec"]["suspend"] = suspend
            self.put("jobsets", jobset)
        elif _has(jobset, "Failed") and not _has(train_job, "Failed"):
            train_job.setdefault("status", {})["conditions"] = jobset["status"]["conditions"]
            self.put("trainjobs", train_job)

    def _reconcile(self, jobset: Object) -> None:
        metadata, spec = jobset["metadata"], jobset["spec"]
        status = jobset.setdefault("status", {"restarts": 0})
        pods = [
            pod for pod in self._of("pods") if pod["metadata"]["labels"][UID] == metadata["uid"]
        ]
        if "deletionTimestamp" in metadata:
            self._end(pods)
            if not pods:
                del self.objects["jobsets", metadata["namespace"], metadata["name"]]
            return
        if _has(jobset, "Failed") or spec.get("suspend"):
            self._end([pod for pod in pods if _is_live(pod)])
            return
        policy = spec.get("failurePolicy", {})
        attempt = str(status["restarts"])
        current = [pod for pod in pods if pod["metadata"]["labels"][ATTEMPT] == attempt]
        self._end([pod for pod in pods if pod not in current])
        if any(pod["status"]["phase"] == "Failed" for pod in current):
            self._end(pods)
            if status["restarts"] < policy.get("maxRestarts", 0):
                status["restarts"] += 1
            else:
                failed = {"type": "Failed", "status": "True", "message": "reached max restarts"}
                status["conditions"] = [failed]
            self.put("jobsets", jobset)
            return
        gone = [pod for pod in current if "deletionTimestamp" in pod["metadata"]]
        in_place = policy.get("restartStrategy") == "InPlaceRestart"
        count = status.get("currentInPlaceRestartAttempt", 0)
        if in_place and any(pod["metadata"]["annotations"][IN_PLACE] == str(count) for pod in gone):
            status["currentInPlaceRestartAttempt"] = count + 1
            for pod in current:
                if pod not in gone:
                    pod["metadata"]["annotations"][IN_PLACE] = str(count + 1)
            self.put("jobsets", jobset)
        self._end(gone)
        self._start_missing(jobset, [pod for pod in current if pod not in gone], in_place)

    def _start_missing(self, jobset: Object, pods: list[Object], in_place: bool) -> None:
        metadata, status = jobset["metadata"], jobset["status"]
        if in_place:
            status.setdefault("currentInPlaceRestartAttempt", 0)
        names = {pod["metadata"]["annotations"]["index"] for pod in pods}
        for job in jobset["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]["template"]
            for index in range(job["template"]["spec"].get("parallelism", 1)):
                if (slot := f"{job['name']}-{index}") in names:
                    continue
                annotations = {**template.get("metadata", {}).get("annotations", {}), "index": slot}
                if in_place:
                    annotations[IN_PLACE] = str(status["currentInPlaceRestartAttempt"])
                labels = {NAME: metadata["name"], UID: metadata["uid"]}
                labels[ATTEMPT] = str(status["restarts"])
                name = f"{metadata['name']}-{slot}-{uuid.uuid4().hex[:5]}"
                pod = {
                    "metadata": {
                        "name": name,
                        "namespace": metadata["namespace"],
                        "labels": labels,
                        "annotations": annotations,
                    },
                    "spec": copy.deepcopy(template["spec"]),
                    "status": {"phase": "Pending"},
                }
                self.put("pods", pod)

    def _schedule(self) -> None:
        busy = {pod["spec"].get("nodeName") for pod in self._of("pods") if _is_live(pod)}
        nodes = [
            node["metadata"]["name"]
            for node in sorted(self._of("nodes"), key=lambda node: str(node["metadata"]["name"]))
            if not node["spec"].get("unschedulable")
        ]
        for pod in self._of("pods"):
            if pod["status"]["phase"] != "Pending" or "nodeName" in pod["spec"]:
                continue
            free = [name for name in nodes if name not in busy]
            if not free:
                reason = "0/4 nodes are available: 4 node(s) were unschedulable."
                unscheduled = {"type": "PodScheduled", "status": "False", "message": reason}
                pod["status"]["conditions"] = [unscheduled]
                continue
            pod["spec"]["nodeName"] = free[0]
            busy.add(free[0])
            pod["status"] = {"phase": "Running"}
            self.put("pods", pod)
            self.started.append(copy.deepcopy(pod))

    def _end(self, pods: Iterable[Object]) -> None:
        """Delete pods; those that are being deleted already are gone now."""
        for pod in list(pods):
            metadata = pod["metadata"]
            if "deletionTimestamp" not in metadata:
                metadata["deletionTimestamp"] = _now()
                self.put("pods", pod)
            elif not self.keeps_deleted_pods:
                del self.objects["pods", metadata["namespace"], metadata["name"]]


# --- objects of tests ------------------------------------------------------------------------


def jobset_of(name: str = "train", pods: int = 2, **policy: Any) -> Object:
    """Return a JobSet without a uid; `policy`: its failure policy."""
    template = {"metadata": {}, "spec": {"containers": [{"name": "train", "image": "train"}]}}
    job = {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": template}
    spec: Object = {
        "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}]
    }
    if policy:
        spec["failurePolicy"] = policy
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"team": "a"}},
        "spec": spec,
    }


def train_job_of(name: str = "train", nodes: int = 2) -> Object:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": nodes}},
    }


# --- HTTP ------------------------------------------------------------------------------------


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out clients that were killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler(cluster: KubernetesCluster) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve("GET")

        def do_POST(self) -> None:
            self._serve("POST")

        def do_PATCH(self) -> None:
            self._serve("PATCH")

        def do_DELETE(self) -> None:
            self._serve("DELETE")

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _serve(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path, _, query_text = self.path.partition("?")
            query = dict(part.split("=", 1) for part in query_text.split("&") if part)
            query = {
                key: value.replace("%2F", "/").replace("%3D", "=") for key, value in query.items()
            }
            found = _PATH.fullmatch(path)
            verb = VERBS.get(method) or ("get" if found and found["name"] else "list")
            call = f"{verb} {found['resource'] if found else path}"
            fault = self._fault(call)
            if isinstance(fault, int):
                self._answer(fault, {"kind": "Status", "code": fault, "message": f"fault {fault}"})
                return
            if fault == "hang":
                time.sleep(3.0)
                self.close_connection = True
                return
            cluster.on_call("before", call)
            status = 201 if method == "POST" else 200
            try:
                if self.headers.get("Authorization") != f"Bearer {cluster.token}":
                    raise RefusedError(401, "Unauthorized")
                kind = self.headers.get("Content-Type", "")
                with cluster.lock:
                    answer = copy.deepcopy(cluster.handle(method, path, query, kind, body))
            except RefusedError as refusal:
                status = refusal.status
                answer = {"kind": "Status", "code": status, "message": str(refusal)}
                if status == 404:
                    answer["reason"] = "NotFound"
            cluster.on_call("after", call)
            if fault == "cut":  # the request is carried out, and its answer lost in the middle
                self._answer(status, answer, cut=True)
                return
            self._answer(status, answer)

        def _fault(self, call: str) -> int | str | None:
            with cluster.lock:
                if cluster.queue_responses and cluster.queue_responses[0][0] == call:
                    return cluster.queue_responses.pop(0)[1]
            return None

        def _answer(self, status: int, answer: Object, cut: bool = False) -> None:
            content = json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if cut else content)
            except OSError:  # the client was killed
                cut = True
            self.close_connection |= cut

    return Handler


# --- patches and rules -------------------------------------------------------------------------


def _merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _apply(obj: Object, operation: Object) -> None:
    """RFC 6902: test, add and replace."""
    parts = [
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
    ]
    place: Any = obj
    for part in parts[:-1]:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if operation["op"] == "test":
        if place.get(parts[-1]) != operation["value"]:
            raise RefusedError(
                422, "the server rejected our request due to an error in our request"
            )
    elif operation["op"] in ("add", "replace"):
        place[parts[-1]] = operation["value"]
    else:
        raise RefusedError(422, f"unknown operation {operation['op']}")


def _check_immutable(resource: str, before: Object, after: Object) -> None:
    """The rules of the webhooks of JobSet and Trainer."""
    if resource == "jobsets":
        old, new = copy.deepcopy(before["spec"]), copy.deepcopy(after["spec"])
        if old.get("suspend") or new.get("suspend"):
            for spec in (old, new):
                for job in spec["replicatedJobs"]:
                    template = job["template"]["spec"]["template"]
                    template.pop("metadata", None)
                    template["spec"].pop("nodeSelector", None)
                    template["spec"].pop("tolerations", None)
        for field in ("replicatedJobs", "failurePolicy", "network", "successPolicy"):
            if old.get(field) != new.get(field):
                raise RefusedError(422, f"spec.{field}: field is immutable")
    if resource == "trainjobs":
        for field in ("runtimeRef", "trainer", "initializer"):
            if before["spec"].get(field) != after["spec"].get(field):
                raise RefusedError(422, f"spec.{field}: field is immutable")


def _raise_for(schema: Any, obj: Object) -> None:
    for error in schema.iter_errors(obj):
        raise RefusedError(422, f"{error.message} at {list(error.instance_path)}")


def _is_live(pod: Object) -> bool:
    return pod["status"]["phase"] not in ("Succeeded", "Failed")


def _has(obj: Object, kind: str) -> bool:
    conditions = obj.get("status", {}).get("conditions", [])
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def _set_phase(pod: Object, phase: str) -> None:
    pod["status"]["phase"] = phase


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
