"""What the chart renders, by kind and by component: for tests."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.helm_template import documents
from tests.deploy.kube_schemas import pod_templates
from tests.deploy.kube_values import ALL

Object = dict[str, Any]
SETS = [pytest.param(values, id=name) for name, values in ALL.items()]


def rendered(values: Object) -> list[Object]:
    """Return every object of the chart with these values; not to be changed."""
    return _parse_documents(json.dumps(values))


@functools.cache
def _parse_documents(values: str) -> list[Object]:
    return documents(json.loads(values))


def objects(values: Object, kind: str) -> list[Object]:
    """Return the objects of a kind."""
    return [each for each in rendered(values) if each["kind"] == kind]


def names(values: Object, kind: str) -> set[str]:
    """Return the names of the objects of a kind."""
    return {each["metadata"]["name"] for each in objects(values, kind)}


def pods(values: Object) -> Iterator[Object]:
    """Yield the templates of all pods."""
    for each in rendered(values):
        yield from pod_templates(each)


def pod_of(values: Object, component: str) -> Object:
    """Return the template of the pods of a component."""
    return next(pod for pod in pods(values) if pod["metadata"]["labels"]["app.kubernetes.io/component"] == component)


def main_of(pod: Object) -> Object:
    """Return a pod's own container."""
    found: Object = pod["spec"]["containers"][0]
    return found


def flag(words: list[str], name: str) -> str:
    """Return the value of `--name=` among the words."""
    return next(word.split("=", 1)[1] for word in words if word.startswith(f"{name}="))
