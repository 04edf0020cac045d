"""`helm template` for deploy/helm/pdserve, over the subset of go_template.py: values and their schema, files, objects.

Run as a program it writes deploy/kubernetes anew (scripts/kubernetes-manifests).
"""

import base64
import copy
import json
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.go_template import Function, TemplateError, parse, render, truth

CLONE = Path(__file__).resolve().parents[2]
CHART = CLONE / "deploy" / "helm" / "pdserve"
MANIFESTS = CLONE / "deploy" / "kubernetes"
Values = dict[str, Any]

_HEADER = "# Made by scripts/kubernetes-manifests from deploy/helm/pdserve; do not edit: patch it with kustomize.\n"
_SECRET = {"clusterSecret": {"existing": "pdserve-cluster-secret"}}
_FILES: dict[str, tuple[Values, str]] = {
    "cluster.yaml": (_SECRET, ""),
    "servicemonitor.yaml": (_SECRET | {"serviceMonitor": {"enabled": True}}, "servicemonitor.yaml"),
    "kuberay.yaml": (_SECRET | {"ray": {"enabled": True}}, ""),
}
"""Each plain manifest: its values, and the template it is made of where that is one alone."""


def documents(values: Values | None = None, *, release: str = "pdserve", namespace: str = "models") -> list[Any]:
    """Return every object of the chart with these values over its own. Raises ValidationError, TemplateError."""
    texts = files(values, release=release, namespace=namespace)
    return [each for text in texts.values() for each in yaml.safe_load_all(text) if each]


def files(
    values: Values | None = None, *, release: str = "pdserve", namespace: str = "models", service: str = "Helm"
) -> dict[str, str]:
    """Return the text of each template's file."""
    merged = merged_values(yaml.safe_load((CHART / "values.yaml").read_text()), values or {})
    jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text())).validate(merged)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    dot = {
        "Values": merged,
        "Release": {"Name": release, "Namespace": namespace, "Service": service},
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
    }
    parsed = {path.name: parse(path.read_text()) for path in sorted((CHART / "templates").iterdir())}
    defined = {name: nodes for _, each in parsed.values() for name, nodes in each.items()}
    return {
        name: render(nodes, dot, defined, FUNCTIONS)
        for name, (nodes, _) in parsed.items()
        if not name.startswith("_") and name.endswith(".yaml")
    }


def merged_values(base: Values, override: Values) -> Values:
    """Return `override` laid over `base`, map by map; null takes a key out, as helm does."""
    found = copy.deepcopy(base)
    for key, value in override.items():
        if isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merged_values(found[key], value)
        elif value is None:
            found.pop(key, None)
        else:
            found[key] = copy.deepcopy(value)
    return found


def manifests() -> dict[str, str]:
    """Return the text of each plain manifest by its file's name."""
    return {name: _manifest(*parts) for name, parts in _FILES.items()}


def _manifest(values: Values, only: str) -> str:
    made = files(values, namespace="pdserve", service="kustomize")
    kept = [text.strip().removeprefix("---\n") for name, text in made.items() if only in ("", name)]
    return _HEADER + "---\n" + "\n---\n".join(text for text in kept if any(yaml.safe_load_all(text))) + "\n"


def _to_yaml(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=False, sort_keys=True, width=1000).rstrip("\n").removesuffix("\n...")
    )


def _indent(count: int, text: str) -> str:
    return "\n".join(" " * count + line for line in text.split("\n"))


def _fail(message: str) -> None:
    raise TemplateError(message)


def _printf(form: str, *values: Any) -> str:
    return form.replace("%v", "%s") % values


def _lookup(version: str, kind: str, namespace: str, name: str) -> Mapping[str, Any]:
    """As without a cluster to query: `helm template`."""
    return {}


FUNCTIONS: dict[str, Function] = {
    "add": lambda *numbers: sum(int(number) for number in numbers),
    "and": lambda *values: next((value for value in values if not truth(value)), values[-1]),
    "b64enc": lambda text: base64.b64encode(text.encode()).decode(),
    "contains": lambda part, text: part in text,
    "default": lambda other, value=None: value if truth(value) else other,
    "dir": posixpath.dirname,
    "div": lambda a, b: int(a) // int(b),
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "eq": lambda first, *others: first in others,
    "fail": _fail,
    "gt": lambda a, b: a > b,
    "indent": _indent,
    "int": lambda value: int(value),
    "index": lambda value, key: value[key],
    "list": lambda *values: list(values),
    "lookup": _lookup,
    "ne": lambda a, b: a != b,
    "nindent": lambda count, text: "\n" + _indent(count, text),
    "not": lambda value: not truth(value),
    "or": lambda *values: next((value for value in values if truth(value)), values[-1]),
    "printf": _printf,
    "quote": lambda value: json.dumps(str(value), ensure_ascii=False),
    "randAlphaNum": lambda count: "r" * count,
    "squote": lambda value: f"'{value}'",
    "toYaml": _to_yaml,
    "trim": lambda text: text.strip(),
    "trimSuffix": lambda end, text: text.removesuffix(end),
    "trunc": lambda count, text: text[:count],
}


def main() -> None:
    """Write the plain manifests."""
    for name, text in manifests().items():
        (MANIFESTS / name).write_text(text)


if __name__ == "__main__":
    main()
