"""The fake worker reads the command line that start_servers.sh writes for vLLM."""

import pytest

from testing.vllm_worker.serve_flags import settings_of
from testing.vllm_worker.settings import WorkerSettings

_KV = ("--kv-transfer-config", '{"kv_connector": "NixlConnector"}')


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--port", "8101"), WorkerSettings(port=8101)),
        (("serve", "/m", "--tensor-parallel-size", "2", *_KV), WorkerSettings(model="/m")),
        (("serve", "/m", "--served-model-name", "a", "b"), WorkerSettings(model="a", connector="none")),
        (("--settings", '{"lease_s": 1}', "serve", "/m", "-dp", "2", *_KV), WorkerSettings(
            model="/m", lease_s=1, num_ranks=2,
        )),
        (("serve", "/m", "--host=0.0.0.0", "--port=1", "--api-key", "k", "--enable-prompt-tokens-details", *_KV),
         WorkerSettings(model="/m", host="0.0.0.0", port=1, api_key="k")),
    ],
)  # fmt: skip
def test_known_flags_are_read_and_others_ignored(argv: tuple[str, ...], expected: WorkerSettings) -> None:
    assert settings_of(argv) == expected


def test_the_length_is_the_models() -> None:
    assert settings_of(("serve", "/m", "--max-model-len=77")).fake.max_model_len == 77
