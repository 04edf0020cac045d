"""The parameters of a fake vLLM worker."""

import json
from dataclasses import dataclass, replace
from typing import Any

from testing.engine.fake_model import FakeConfig

_FAKE = FakeConfig(num_layers=1)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Parameters of a worker. `fake` is the model: its `salt`, which other workers may share, its sizes and delays.

    Without a `connector` it ignores `kv_transfer_params`. A decode worker reads the blocks that a reference names, held
    or not, as vLLM does: once they are freed the answer is right until another prompt takes them. `wrong_200`: freed
    blocks of this prefill worker are garbage at once (vllm#52234). A chunk of a stream carries `tokens_per_chunk`.
    `layerwise`: decode is asked first (layerwise.py); `side_channel_host`: the host it then names, if not `host`.
    """

    fake: FakeConfig = _FAKE
    model: str = "model"
    version: str = "0.32.0"
    host: str = "127.0.0.1"
    port: int = 0
    connector: bool = True
    api_key: str | None = None
    num_ranks: int = 1
    max_num_seqs: int = 64
    lease_s: float = 30.0
    wrong_200: bool = False
    tokens_per_chunk: int = 1
    layerwise: bool = False
    side_channel_host: str | None = None

    @property
    def is_pull(self) -> bool:
        """Whether a decode worker reads the KV that a prefill worker holds."""
        return self.connector and not self.layerwise


def settings_from(text: str) -> WorkerSettings:
    """Read settings from JSON; `fake` is an object of FakeConfig's fields. Raises TypeError or ValueError."""
    values = json.loads(text)
    fake: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.pop("fake", {}).items()
    }
    return WorkerSettings(**values, fake=replace(_FAKE, **fake))
