"""docs/http-api.md has each route of vLLM 0.33 once: those that it calls served are the ones that the app has."""

import re
from pathlib import Path
from typing import Any

import pytest

from scheduler.app import open_routes
from scheduler.config import SchedulerOptions

_PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"
_ROW = re.compile(r"^\| (`/.*?`) \| (.+?) \|$", re.MULTILINE)
_PARAMETER = re.compile(r"\{[^}]*\}")
VLLM_ROUTES = [
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/models", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
    "/v1/decisions", "/v1/systemone", "/generative_scoring", "/cohere/v2/chat", "/v1/audio/transcriptions",
    "/v1/audio/translations", "/v1/realtime", "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/tokenizer_info",
    "/inference/v1/generate", "/inference/v1/abort_requests", "/abort_requests", "/v1/chat/completions/render",
    "/v1/completions/render", "/v1/messages/render", "/v1/responses/render", "/v1/chat/completions/derender",
    "/v1/completions/derender", "/invocations", "/ping", "/health", "/load", "/version", "/metrics", "/openapi.json",
    "/docs", "/kv_event_sources", "/server_info", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
    "/collective_rpc", "/sleep", "/release_kv_cache_memory", "/wake_up", "/is_sleeping", "/pause", "/resume",
    "/is_paused", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_info",
    "/weight_checker", "/get_world_size", "/start_profile", "/stop_profile", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply",
    "/fault_tolerance/status",
]  # fmt: skip
"""The paths of its OpenAI server's routers in the sources of vLLM 0.33.0, all features and modes included."""


def _documented() -> list[tuple[str, str]]:
    """Return each route of the table with what it says."""
    table = _PAGE.read_text(encoding="utf-8").partition("## Routes of vLLM 0.33\n")[2].partition("\n## ")[0]
    return [(path, here) for paths, here in _ROW.findall(table) for path in re.findall(r"`([^`]+)`", paths)]


def _open_paths() -> set[str]:
    """Return the paths that the app has with every flag; parameters have no names."""
    flags: dict[str, Any] = {field: True for field in SchedulerOptions.__dataclass_fields__ if "enable_" in field}
    return {_PARAMETER.sub("{}", route.path) for route in open_routes(SchedulerOptions(**flags))}


@pytest.mark.covers("B.ops.9")
def test_the_table_has_each_route_of_vllm_once() -> None:
    assert sorted(path for path, _ in _documented()) == sorted(VLLM_ROUTES)


@pytest.mark.covers("B.ops.9")
def test_the_routes_called_served_are_those_of_the_app() -> None:
    called_served = {path for path, here in _documented() if here.startswith("served")}
    missing = {path for path, here in _documented() if not here.startswith(("served", "no: ", "not served yet"))}

    assert missing == set()
    assert called_served == {path for path in VLLM_ROUTES if _PARAMETER.sub("{}", path) in _open_paths()}
