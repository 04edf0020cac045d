"""The Grafana dashboard is valid, and queries nothing that /metrics does not have."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.finished_requests import FinishedRequests
from scheduler.observability.metrics import Metrics
from scheduler.observability.request_done import RequestDone
from scheduler.request import GenerationRequest, PromptDone
from scheduler.view import ClusterView, GapView, InstanceView
from tests.scheduler.fake_cluster import describe
from wire.load import LinkStatus, LoadSnapshot
from wire.types import Role, SamplingParams, StageTimes

PAGE = Path(__file__).parents[2] / "deploy" / "grafana" / "pdserve.json"
ADDED = {"job", "instance", "exported_instance", "le"}
"""Labels that Prometheus adds, or that belong to a kind of metric."""

_TARGET = {
    "type": "object",
    "required": ["refId", "expr", "datasource", "legendFormat"],
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "expr": {"type": "string", "minLength": 1}},
}
_POSITION = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "additionalProperties": False,
    "properties": {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    },
}
_SHOWN = {
    "required": ["description", "datasource", "targets", "fieldConfig", "options"],
    "properties": {
        "description": {"type": "string", "minLength": 1},
        "targets": {"type": "array", "minItems": 1, "items": _TARGET},
        "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
    },
}
_PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer"},
        "type": {"enum": ["row", "timeseries", "stat", "table"]},
        "title": {"type": "string", "minLength": 1},
        "gridPos": _POSITION,
    },
    "if": {"properties": {"type": {"const": "row"}}},
    "else": _SHOWN,
}
SHAPE = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time", "annotations"],
    "properties": {
        "id": {"const": None},
        "uid": {"type": "string", "maxLength": 40},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "items": _PANEL},
        "templating": {"type": "object", "required": ["list"]},
    },
}
"""The structure of a dashboard of Grafana 9 and later, as far as this one uses it."""


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(PAGE.read_text())


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of every sample on /metrics, by its name."""
    link = LinkStatus("d", "tcp", "up", 1, 1, 0, 0, 0.1, 1.0, ("shm: another host",))
    load = LoadSnapshot(blocks_total=1, step_tokens=(0,) * 14, links=(link,))
    instance = InstanceView(0, "prefill-0", Role.PREFILL, "p", "living", "", describe(0, Role.PREFILL), load)
    gap = GapView("p", "d", "none")
    metrics = Metrics(lambda: ClusterView(True, (instance,), FinishedRequests(), 0, 0, gaps=(gap,)))
    metrics.http_request("/v1/completions", "POST", 200)
    request = GenerationRequest("r", ((1,),), SamplingParams(max_tokens=1), 1.0, 1.0)
    served = PromptDone(0, "handoff", "", "p", "d", StageTimes(queue_s=0.1))
    metrics.counters.request_done(RequestDone(request, (served,), "finished", 1.0))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _panels(dashboard: Any) -> Iterator[Any]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def _queries(dashboard: Any) -> Iterator[tuple[str, str, str]]:
    """Yield title, expression and legend of every query."""
    for panel in _panels(dashboard):
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for annotation in dashboard["annotations"]["list"]:
        if "expr" in annotation:
            yield annotation["name"], annotation["expr"], ""


def _names(expression: str) -> set[str]:
    """Metrics in an expression: words that are not a function, keyword, label or variable."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|group_left|without)\s*\([^)]*\)", " ", expression)
    words = set(re.findall(r"[a-zA-Z_:][\w:]*(?!\w*\s*\()", bare))
    return {word for word in words if not re.fullmatch(r"and|or|offset|\d*e\d*|[smhd]", word) and "_" in word}


def test_it_has_the_structure_of_a_dashboard(dashboard: Any) -> None:
    jsonschema.validate(dashboard, SHAPE)


def test_panels_have_their_own_place_and_id(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert taken.setdefault(cell, panel["title"]) == panel["title"], "two panels overlap"


def test_every_queried_metric_is_on_the_schedulers_page(dashboard: Any, labels: dict[str, set[str]]) -> None:
    queried = {title: _names(expression) for title, expression, _ in _queries(dashboard)}

    assert {title: names - set(labels) for title, names in queried.items() if names - set(labels)} == {}
    assert all(queried.values()), "each has a query"


def test_every_label_used_is_one_of_the_metrics(dashboard: Any, labels: dict[str, set[str]]) -> None:
    for title, expression, legend in _queries(dashboard):
        known = ADDED.union(*(labels[name] for name in _names(expression)))
        used = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression))
        for group in re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", expression):
            used.update(label.strip() for label in group.split(","))
        used.update(re.findall(r"\{\{(\w+)\}\}", legend))
        assert used <= known, (title, used - known)


def test_every_query_is_of_the_chosen_job_and_source(dashboard: Any) -> None:
    for title, expression, _ in _queries(dashboard):
        assert expression.count("{") == expression.count('{job=~"$job"'), title
        assert len(_names(expression)) <= expression.count("{"), title
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "job"}
    sources = {target["datasource"]["uid"] for panel in _panels(dashboard) for target in panel["targets"]}
    assert sources == {"${datasource}"}


def test_the_dashboard_has_every_metric_that_deserves_an_alert(dashboard: Any) -> None:
    shown = set().union(*(_names(expression) for _, expression, _ in _queries(dashboard)))

    assert shown >= {
        "pdserve_link_up", "pdserve_link_impossible", "pdserve_link_fallbacks_total", "pdserve_kv_frames_corrupt_total",
        "pdserve_kv_links_refused_total", "pdserve_time_to_first_token_seconds_bucket", "pdserve_kv_hop_seconds_bucket",
        "pdserve_inter_token_latency_seconds_bucket", "pdserve_queued_prompts", "pdserve_kv_blocks_used",
        "pdserve_preemptions_total", "pdserve_prefix_tokens_found_total", "pdserve_prompts_retried_total",
    }  # fmt: skip
