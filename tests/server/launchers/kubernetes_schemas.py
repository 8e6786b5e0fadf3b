"""JSON schemas of what is sent to Kubernetes, written from the published types.

JobSet: api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset. TrainJob:
pkg/apis/trainer/v1alpha1/trainjob_types.go of kubeflow/trainer. ControllerRevision, Node,
DeleteOptions: Kubernetes' own API. Pod specs are open; unknown fields elsewhere are errors, as with
fieldValidation=Strict.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """Return the schema of an object without other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
OPEN: Schema = {"type": "object"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
CONDITIONS: Schema = {"type": "array", "items": OPEN}


def listed(items: Schema, at_most: int = 1000) -> Schema:
    return {"type": "array", "items": items, "maxItems": at_most}


def one_of(*names: str) -> Schema:
    return {"enum": list(names)}


METADATA = closed(
    ("name",),
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253},
    namespace=TEXT,
    uid=TEXT,
    resourceVersion=TEXT,
    generation=COUNT,
    creationTimestamp=TEXT,
    deletionTimestamp=TEXT,
    labels=LABELS,
    annotations={
        "type": "object",
        "additionalProperties": TEXT,
        "propertyNames": {
            "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9][-\w.]{0,62}$"
        },
    },
    finalizers=listed(TEXT),
    ownerReferences=listed(
        closed(
            ("apiVersion", "kind", "name", "uid"),
            apiVersion=TEXT,
            kind=TEXT,
            name=TEXT,
            uid=TEXT,
            controller=BOOLEAN,
            blockOwnerDeletion=BOOLEAN,
        )
    ),
)
POD_TEMPLATE = closed(("spec",), metadata=closed(labels=LABELS, annotations=TEXTS), spec=OPEN)
JOB_TEMPLATE = closed(
    ("spec",),
    metadata=closed(labels=LABELS, annotations=TEXTS),
    spec=closed(
        ("template",),
        parallelism=COUNT,
        completions=COUNT,
        completionMode=one_of("NonIndexed", "Indexed"),
        backoffLimit=COUNT,
        activeDeadlineSeconds=COUNT,
        podFailurePolicy=OPEN,
        podReplacementPolicy=one_of("TerminatingOrFailed", "Failed"),
        ttlSecondsAfterFinished=COUNT,
        suspend=BOOLEAN,
        template=POD_TEMPLATE,
    ),
)
JOBSET = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=METADATA,
    spec=closed(
        replicatedJobs=listed(
            closed(
                ("name", "template"),
                name=TEXT,
                groupName=TEXT,
                replicas=COUNT,
                template=JOB_TEMPLATE,
                dependsOn=listed(
                    closed(("name", "status"), name=TEXT, status=one_of("Ready", "Complete")), 5
                ),
            )
        ),
        network=closed(
            enableDNSHostnames=BOOLEAN, subdomain=TEXT, publishNotReadyAddresses=BOOLEAN
        ),
        successPolicy=closed(
            ("operator",), operator=one_of("All", "Any"), targetReplicatedJobs=listed(TEXT)
        ),
        failurePolicy=closed(
            maxRestarts=COUNT,
            restartStrategy=one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
            rules=listed(OPEN),
        ),
        startupPolicy=closed(startupPolicyOrder=one_of("AnyOrder", "InOrder")),
        suspend=BOOLEAN,
        coordinator=OPEN,
        managedBy={"type": "string", "maxLength": 63},
        ttlSecondsAfterFinished=COUNT,
        volumeClaimPolicies=listed(OPEN, 50),
    ),
    status=closed(
        conditions=CONDITIONS,
        restarts=COUNT,
        restartsCountTowardsMax=COUNT,
        terminalState=TEXT,
        replicatedJobsStatus=listed(OPEN),
        previousInPlaceRestartAttempt=COUNT,
        currentInPlaceRestartAttempt=COUNT,
    ),
)
TRAINJOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("trainer.kubeflow.org/v1alpha1"),
    kind=one_of("TrainJob"),
    metadata=METADATA,
    spec=closed(
        ("runtimeRef",),
        runtimeRef=closed(("name",), name=TEXT, apiGroup=TEXT, kind=TEXT),
        initializer=OPEN,
        trainer=closed(
            image=TEXT,
            command=listed(TEXT, 128),
            args=listed(TEXT, 128),
            env=listed(OPEN, 128),
            numNodes=COUNT,
            resourcesPerNode=OPEN,
            numProcPerNode=COUNT,
        ),
        runtimePatches=listed(OPEN, 16),
        suspend=BOOLEAN,
        activeDeadlineSeconds=COUNT,
        managedBy=one_of("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"),
    ),
    status=closed(conditions=CONDITIONS, jobsStatus=listed(OPEN)),
)
REVISION = closed(
    ("apiVersion", "kind", "metadata", "revision"),
    apiVersion=one_of("apps/v1"),
    kind=one_of("ControllerRevision"),
    metadata=METADATA,
    revision={"type": "integer"},
    data=OPEN,
)
NODE = closed(
    ("metadata",),
    apiVersion=one_of("v1"),
    kind=one_of("Node"),
    metadata=METADATA,
    spec=closed(unschedulable=BOOLEAN, taints=listed(OPEN), podCIDR=TEXT, providerID=TEXT),
    status=OPEN,
)
DELETE_OPTIONS = closed(
    apiVersion=one_of("v1"),
    kind=one_of("DeleteOptions"),
    propagationPolicy=one_of("Orphan", "Background", "Foreground"),
    gracePeriodSeconds=COUNT,
    preconditions=closed(uid=TEXT, resourceVersion=TEXT),
)
BY_RESOURCE = {
    "jobsets": JOBSET,
    "trainjobs": TRAINJOB,
    "controllerrevisions": REVISION,
    "nodes": NODE,
}
