"""The names of vLLM that its tests of the server use, written by us."""

import base64
from types import SimpleNamespace
from typing import Any

from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from pdserve.ports import free_ports
from tests.images.image_files import file_of
from tests.vllm_server_tests.models import model_folder
from tests.vllm_server_tests.pooled_names import NAMES as POOLED_NAMES
from tests.vllm_server_tests.remote_server import RemoteServer
from tests.vllm_server_tests.vllm_names import install


class ModelConfig:
    """A model's config."""

    def __init__(self, model: str, **settings: Any) -> None:
        self._config = AutoConfig.from_pretrained(model_folder(model))

    def get_vocab_size(self) -> int:
        """Return the number of logits."""
        return int(self._config.vocab_size)


def get_tokenizer(tokenizer_name: str, **settings: Any) -> Any:
    """Return transformers' tokenizer."""
    return _from_pretrained(model_folder(tokenizer_name))


def encode_image_url(image: Image.Image) -> str:
    """Return the data URL of a PNG."""
    return f"data:image/png;base64,{base64.b64encode(file_of(image)).decode()}"


def check_request_balancing(server: RemoteServer, dp_size: int) -> None:
    """Check nothing of one engine, as vLLM's function does."""
    assert dp_size == 1, "the tests run with one engine"


def _as_it_is(function: Any = None, **settings: Any) -> Any:
    return _as_it_is if function is None else function


_from_pretrained = AutoTokenizer.from_pretrained
_NAMES: dict[str, Any] = POOLED_NAMES | {
    "tests.utils.RemoteOpenAIServer": RemoteServer,
    "tests.utils.ROCM_EXTRA_ARGS": [],
    "tests.utils.multi_gpu_only": _as_it_is,
    "tests.utils.requires_fp8": _as_it_is,
    "tests.v1.utils.check_request_balancing": check_request_balancing,
    "vllm.config.ModelConfig": ModelConfig,
    "vllm.multimodal.utils.encode_image_url": encode_image_url,
    "vllm.tokenizers.get_tokenizer": get_tokenizer,
    "vllm.utils.network_utils.get_open_port": lambda: free_ports(1)[0],
    "vllm.envs.VLLM_USE_RUST_FRONTEND": False,
    "vllm.version._prev_minor_version": lambda: "0.32",
    "vllm.platforms.current_platform": SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: False, device_count=lambda: 0
    ),
    "vllm.transformers_utils.repo_utils.hf_api": lambda: SimpleNamespace(snapshot_download=lambda repo_id: repo_id),
}


def install_stand_ins() -> None:
    """Let imports of vLLM find them, and transformers the models that are here."""
    install(_NAMES)
    AutoTokenizer.from_pretrained = lambda name, **settings: _from_pretrained(model_folder(name))
