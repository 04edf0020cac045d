"""Child process: the scheduler classes of vllm-ascend's connectors, from its files, over stand-ins for their imports.

ascend_connectors.py FOLDER < {"held": params, "asked": params}: FOLDER is its package vllm_ascend. Prints what prefill
and decode return for these kv_transfer_params, as JSON.
"""

import importlib.util
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

_ABSENT = ("torch", "torch_npu", "vllm", "vllm_ascend", "mooncake", "msgspec", "zmq", "httpx")
_BLOCK_SIZE = 4
_PROMPT = [11, 12, 13, 14, 15, 16]


class _Anything(type):
    """A class with every attribute, whose subclasses may have arguments."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, MagicMock())
        return cls.__dict__[name]


class _StandIn(types.ModuleType):
    """A module in which every name is a new class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ignores = classmethod(lambda cls, **_: None)
        made = {
            "__init_subclass__": ignores,
            "__init__": lambda *_, **__: None,
            "__call__": lambda _, decorated: decorated,
        }
        setattr(self, name, _Anything(name, (), made))
        return self.__dict__[name]


class _Finder:
    """Finds stand-ins."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _module(folder: Path, name: str) -> Any:
    path = folder / "distributed/kv_transfer/kv_p2p" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a Python file"
    assert spec.loader is not None, "a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _config(*, consumer: bool) -> Any:
    transfer = SimpleNamespace(
        is_kv_consumer=consumer, kv_port=30000, get_from_extra_config=lambda _, default: default
    )  # fmt: skip
    sizes = dict.fromkeys(
        ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
         "decode_context_parallel_size"), 1,
    )  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(data_parallel_rank=0, **sizes),
        cache_config=SimpleNamespace(block_size=_BLOCK_SIZE),
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )


def _request(params: dict[str, Any], status: Any = None) -> Any:
    return SimpleNamespace(
        request_id="cmpl-R-0-12345678", kv_transfer_params=params, prompt_token_ids=list(_PROMPT), status=status,
        num_prompt_tokens=len(_PROMPT), num_computed_tokens=0, output_token_ids=[7], all_token_ids=list(_PROMPT),
    )  # fmt: skip


_CACHE = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=_BLOCK_SIZE))])
_BLOCKS = SimpleNamespace(get_block_ids=lambda: ([1, 2],), get_unhashed_block_ids_all_groups=lambda: ([1, 2],))


def _layerwise(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what decode calls back with, where, and whether prefill takes it."""
    found = _module(folder, "mooncake_layerwise_connector")
    found.get_ip = lambda: "127.0.0.1"
    decode, prefill = (
        found.MooncakeLayerwiseConnectorScheduler(_config(consumer=consumer), _CACHE, "e") for consumer in (True, False)
    )
    calls: list[tuple[str, Any]] = []
    decode.metaserver_client = SimpleNamespace(post=lambda url, json: calls.append((url, json)))
    request = _request(asked)
    waits = decode.get_num_new_matched_tokens(request, 0)
    decode.update_state_after_alloc(request, _BLOCKS, waits[0])
    decode.executor.shutdown(wait=True)
    (url, wanted), = calls  # fmt: skip
    sent = _request(json.loads(json.dumps(wanted)))
    prefill.get_num_new_matched_tokens(sent, 0)
    prefill.update_state_after_alloc(sent, _BLOCKS, 0)
    ended = prefill.request_finished(sent, [1, 2])
    return {
        "url": url,
        "wanted": wanted,
        "waits": waits,
        "sends": list(prefill._reqs_need_send_layerwise),
        "ended": ended,
    }


def _pull(folder: Path, held: dict[str, Any]) -> dict[str, Any]:
    """Return the reference of prefill by how the request ended, and whether decode fetches it."""
    found = _module(folder, "mooncake_connector")
    found.get_ip = lambda: "127.0.0.1"
    found.cdiv = lambda one, other: -(-one // other)
    scheduler = found.MooncakeConnectorScheduler
    prefill, decode = (scheduler(_config(consumer=consumer), "e", _CACHE) for consumer in (False, True))
    by_length = found.RequestStatus.FINISHED_LENGTH_CAPPED
    stopped = prefill.request_finished(_request(held, "stopped"), ([1, 2],))[1]
    reference = json.loads(json.dumps(prefill.request_finished(_request(held, by_length), ([1, 2],))[1]))
    request = _request(dict(reference))
    decode.update_state_after_alloc(request, _BLOCKS, decode.get_num_new_matched_tokens(request, 0)[0])
    return {"stopped": stopped, "reference": reference, "fetches": list(decode._reqs_need_recv)}


def main() -> None:
    """Print both."""
    sys.meta_path.insert(0, _Finder())
    folder, given = Path(sys.argv[1]), json.load(sys.stdin)
    print(json.dumps({"layerwise": _layerwise(folder, given["asked"]), "pull": _pull(folder, given["held"])}))


if __name__ == "__main__":
    main()
