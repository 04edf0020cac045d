"""The command line of `vllm serve` for a fake worker, as start_servers.sh writes it; unknown flags are ignored."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testing.vllm_worker.settings import WorkerSettings, settings_from

_CONNECTORS = {
    None: "none", "NixlConnector": "nixl", "MooncakeConnectorV1": "nixl", "NixlPushConnector": "nixl-push",
    "MooncakeLayerwiseConnector": "ascend-layerwise", "MooncakeConnector": "mooncake",
}  # fmt: skip


def settings_of(argv: Sequence[str]) -> WorkerSettings:
    """Return the settings of `[--settings JSON] serve MODEL [flags]`; without `serve` only the flags count."""
    parser = argparse.ArgumentParser(prog="python -m testing.vllm_worker", description=__doc__, allow_abbrev=False)
    parser.add_argument("command", nargs="*", help="serve MODEL")
    parser.add_argument("--settings", default="{}", help="fields of WorkerSettings as JSON")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--api-key")
    parser.add_argument("--data-parallel-size", "-dp", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    args, _ = parser.parse_known_args(argv)
    settings = settings_from(args.settings)
    model = args.served_model_name[0] if args.served_model_name else args.command[1] if args.command[1:] else None
    connector = _CONNECTORS[(args.kv_transfer_config or {}).get("kv_connector")] if args.command else None
    found: dict[str, Any] = {
        "host": args.host, "port": args.port, "model": model, "api_key": args.api_key, "connector": connector,
        "num_ranks": args.data_parallel_size,
    }  # fmt: skip
    if args.max_model_len is not None:
        found["fake"] = replace(settings.fake, max_model_len=args.max_model_len)
    return replace(settings, **{name: value for name, value in found.items() if value is not None})
