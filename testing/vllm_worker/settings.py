"""The parameters of a fake vLLM worker."""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from testing.engine.fake_model import FakeConfig

Connector = Literal["none", "nixl", "ascend-layerwise", "nixl-push", "mooncake"]

_FAKE = FakeConfig(num_layers=1)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Parameters of a worker. `fake` is the model: its `salt`, which other workers may share, its sizes and delays.

    With `connector` none it ignores `kv_transfer_params`. With nixl a decode worker reads the blocks that a reference
    names, held or not, as vLLM does: once they are freed the answer is right until another prompt takes them.
    `wrong_200`: freed blocks of this prefill worker are garbage at once (vllm#52234). `engine_id` is the same in all
    its lives, as if set in a --kv-transfer-config (default: a new one for each). Its references name blocks
    `block_offset` further than those that it holds. A chunk of a stream carries `tokens_per_chunk`. With
    ascend-layerwise the decode leg is sent first (layerwise.py), and names `side_channel_host`, else `host`; with
    nixl-push and mooncake both legs are sent at once (push.py), mooncake's engines found at `bootstrap_port`.
    The images of a chat take `image_seconds`, in each leg. With `is_hybrid` the model keeps a state (hybrid.py).
    """

    fake: FakeConfig = _FAKE
    model: str = "model"
    version: str = "0.32.0"
    host: str = "127.0.0.1"
    port: int = 0
    connector: Connector = "nixl"
    api_key: str | None = None
    num_ranks: int = 1
    max_num_seqs: int = 64
    lease_s: float = 30.0
    wrong_200: bool = False
    engine_id: str | None = None
    block_offset: int = 0
    image_seconds: float = 0.0
    tokens_per_chunk: int = 1
    side_channel_host: str | None = None
    bootstrap_port: int = 0
    is_hybrid: bool = False


def settings_from(text: str) -> WorkerSettings:
    """Read settings from JSON; `fake` is an object of FakeConfig's fields. Raises TypeError or ValueError."""
    values = json.loads(text)
    fake: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.pop("fake", {}).items()
    }
    return WorkerSettings(**values, fake=replace(_FAKE, **fake))
