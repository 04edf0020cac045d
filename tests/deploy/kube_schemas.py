"""Check objects by the API's own schemas (kubernetes-validate carries them), and those of operators by what we use.

The schemas of LeaderWorkerSet, ServiceMonitor and RayJob are written here, for the fields that the chart has; the pods
in them are checked by the API's.
"""

from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]  # it has no stubs

VERSIONS = ("1.29", "1.37")
Object = dict[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Any) -> Object:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


_TEXT, _NUMBER, _ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_GROUP = {"rayStartParams": _TEXTS, "template": _ANY}
_WORKERS = _object(
    ("groupName", "rayStartParams", "template"), groupName=_TEXT, replicas=_NUMBER, minReplicas=_NUMBER,
    maxReplicas=_NUMBER, **_GROUP,
)  # fmt: skip
_SPECS = {
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet": _object(
        ("leaderWorkerTemplate",),
        replicas=_NUMBER,
        rolloutStrategy=_object(
            ("type",), type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=_object(maxUnavailable=_NUMBER, maxSurge=_NUMBER),
        ),
        leaderWorkerTemplate=_object(
            ("workerTemplate",), size=_NUMBER, workerTemplate=_ANY,
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
        ),
    ),
    "monitoring.coreos.com/v1/ServiceMonitor": _object(
        ("selector", "endpoints"),
        selector=_object(matchLabels=_TEXTS),
        endpoints={"type": "array", "minItems": 1, "items": _object(("port",), port=_TEXT, path=_TEXT, interval=_TEXT)},
    ),
    "ray.io/v1/RayJob": _object(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=_TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=_object(
            ("headGroupSpec",), rayVersion=_TEXT, headGroupSpec=_object(("rayStartParams", "template"), **_GROUP),
            workerGroupSpecs={"type": "array", "items": _WORKERS},
        ),
    ),
}  # fmt: skip


def check(document: Object, version: str = VERSIONS[-1]) -> None:
    """Raise jsonschema.ValidationError where the API would refuse it, an unknown field included."""
    spec = _SPECS.get(f"{document['apiVersion']}/{document['kind']}")
    if spec is None:
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.Draft202012Validator(spec).validate(document["spec"])
    meta = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}
    kubernetes_validate.validate(meta, version, strict=True)
    for template in pod_templates(document):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pods, version, strict=True)


def pod_templates(document: Object) -> Iterator[Object]:
    """Yield the templates of an object's pods."""
    spec = document.get("spec") or {}
    match document["kind"]:
        case "Deployment" | "StatefulSet":
            yield spec["template"]
        case "LeaderWorkerSet":
            yield spec["leaderWorkerTemplate"]["workerTemplate"]
        case "RayJob":
            cluster = spec["rayClusterSpec"]
            yield from (group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))


def containers(template: Object) -> list[Object]:
    """Return all containers of a pod, including init containers."""
    return [*(template["spec"].get("initContainers") or ()), *template["spec"]["containers"]]
