"""Build the fake engine's model from a model folder: its `fake.json` may set any FakeConfig field (delays, sizes).

The model has one rank per device of the table entry.
"""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

from engine.step import Model
from instance.config import InstanceConfig
from testing.engine.fake_model import FakeConfig, FakeModel, fake_layouts
from wire.errors import ConfigError

DEFAULT_POOL_BYTES = 16 * 2**20


def fake_model(config: InstanceConfig) -> Model:
    """Build the fake model of an instance; its salt is unique, so KV and tokens show which instance computed them."""
    options = config.options
    values = _read(Path(options.model) / "config.json", {"vocab_size": "vocab_size"})
    values |= _read(Path(options.model) / "fake.json", {f.name: f.name for f in dataclasses.fields(FakeConfig)})
    values |= {
        "salt": zlib.crc32(f"{config.server_ip}|{config.device_ids}".encode()),
        "block_size": config.block_size("cpu"),
    }
    if options.max_model_len is not None:
        values["max_model_len"] = options.max_model_len
    if options.dtype != "auto":
        values["dtype"] = options.dtype
    values["ranks"] = config.num_ranks
    draft = FakeConfig(**values)
    try:
        token_bytes = sum(layout.token_bytes for layout in fake_layouts(draft))
    except (KeyError, TypeError, ValueError) as error:
        shape = draft.kv_tensors or (draft.num_layers, draft.heads, draft.head_dim)
        raise ConfigError(
            f"no fake model can be built with ranks {draft.ranks}, {draft.dtype} and KV {shape}: {error}"
        ) from error
    num_blocks = (options.kv_cache_memory or DEFAULT_POOL_BYTES) // (token_bytes * draft.block_size)
    return FakeModel(dataclasses.replace(draft, num_blocks=max(1, num_blocks)))


def _read(path: Path, names: dict[str, str]) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    values = {names[key]: value for key, value in document.items() if key in names}
    return {key: _frozen(value) for key, value in values.items()}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
