"""The --kv-transfer-config of a worker: what its entry implies, completed by what was typed. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.workers.typed_flags import CONNECTOR, KV_CONFIG
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.tables import GlobalTable, InstanceRole, WorkerKind
from scheduler.workers.connectors import AUTO, MOONCAKE, NIXL_PUSH
from wire.errors import ConfigError

Config = dict[str, Any]
MOONCAKE_CLASS = "MooncakeConnector"
"""vLLM's own Mooncake connector: before the start, only the port of its prefill bootstrap server is known."""
_CLASSES: Mapping[WorkerKind, Mapping[str, str]] = {
    "vllm": {
        AUTO: "NixlConnector", "nixl": "NixlConnector", NIXL_PUSH: "NixlPushConnector", MOONCAKE: MOONCAKE_CLASS,
    },
    "vllm-ascend": {
        AUTO: "MooncakeConnectorV1", "ascend": "MooncakeConnectorV1", "ascend-layerwise": "MooncakeLayerwiseConnector",
    },
}  # fmt: skip
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a worker divides its devices."""

    tensor: int
    data: int
    pipeline: int = 1


def connector_class(worker: WorkerKind, name: str) -> str:
    """Return the class of the connector with the scheduler's `name`. Raises ConfigError for another engine's."""
    classes = _CLASSES[worker]
    if name not in classes:
        raise ConfigError(f"--{CONNECTOR} {name} is not supported for {worker}: choose from {', '.join(classes)}")
    return classes[name]


def typed_config(text: str | None) -> Config:
    """Return the config that was typed. Raises ConfigError unless it is a JSON object."""
    try:
        found = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--{KV_CONFIG} {text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--{KV_CONFIG} {text!r} is not a JSON object")
    return found


def kv_config(
    plan: LaunchPlan, connector: str, sizes: Sizes, kv_port: int, life: str, typed: Mapping[str, Any]
) -> Config:  # fmt: skip
    """Return the config of a worker, in which typed values win; `connector` is the class.

    `life` is random: a peer keeps an engine's addresses by the engine's id, and without `life` would use those of an
    earlier process of this entry. Raises ConfigError for typed values that contradict the tables.
    """
    role = _ROLES[plan.role]
    if typed.get("kv_role", role) not in (role, "kv_both"):
        raise ConfigError(f"--{KV_CONFIG} has the kv_role {typed['kv_role']!r}, but {plan.name} is a {role}")
    common: Config = {"kv_connector": connector, "kv_role": role, "kv_load_failure_policy": "fail"}
    if plan.own.worker == "vllm":
        return _merged(common, typed)
    config = _merged(
        {
            **common, "kv_port": kv_port, "engine_id": f"{plan.name}-{life}",
            "kv_connector_extra_config": {one: _of_role(one, plan, sizes) for one in ("prefill", "decode")},
        },
        typed,
    )  # fmt: skip
    extra = config["kv_connector_extra_config"]
    own, wanted = (extra.get(plan.role) if isinstance(extra, dict) else None), _size(sizes)
    if not isinstance(own, dict) or {key: own.get(key) for key in wanted} != wanted:
        raise ConfigError(f"--{KV_CONFIG} has the {plan.role} sizes {json.dumps(own)}, but this worker has {wanted}")
    return config


def _of_role(role: InstanceRole, plan: LaunchPlan, sizes: Sizes) -> Config:
    """Return one role's sizes: this worker's, or for the other role one rank for each device of its entries."""
    return _size(sizes if role == plan.role else Sizes(_num_devices(role, plan.global_table), 1))


def _num_devices(role: InstanceRole, table: GlobalTable) -> int:
    listed = [len(one.server.devices) for one in table.instances if one.role == role and one.server.devices]
    return listed[0] if listed else 1


def _size(sizes: Sizes) -> Config:
    stages = {"pp_size": sizes.pipeline} if sizes.pipeline > 1 else {}
    return {"dp_size": sizes.data, "tp_size": sizes.tensor} | stages


def _merged(ours: Config, typed: Mapping[str, Any]) -> Config:
    merged = dict(ours)
    for key, value in typed.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
