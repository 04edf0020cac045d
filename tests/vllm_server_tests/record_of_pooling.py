"""The record of vLLM's tests of routes for vectors, classes and scores."""

from collections.abc import Sequence

from tests.vllm_server_tests.server_file import (
    ERROR_TYPE,
    ServerFile,
)

_E5, _APEACH = "intfloat/multilingual-e5-small", "jason9693/Qwen2.5-1.5B-apeach"


def _other_type(tasks: Sequence[str], model: str = "") -> dict[str, str]:
    return {f"test_pooling_not_supported[{task}{f'-{model}' if model else ''}]": ERROR_TYPE for task in tasks}


POOLING_FILES: dict[str, ServerFile] = {
    "pooling/scoring/test_bi_encoder_online.py": ServerFile(
        12, {"*": "vectors768"}, _other_type(("classify", "token_classify", "plugin"))
    ),
}  # fmt: skip
