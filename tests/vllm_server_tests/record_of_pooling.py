"""The record of vLLM's tests of routes for vectors, classes and scores."""

from collections.abc import Sequence

from tests.vllm_server_tests.server_file import (
    ANSWER,
    CLASSES,
    ERROR_TYPE,
    VECTORS,
    VOCABULARY,
    ServerFile,
)

_E5, _APEACH = "intfloat/multilingual-e5-small", "jason9693/Qwen2.5-1.5B-apeach"
_NO_ROUTE = "a route that the model does not support is a 400 with the reason, in vLLM a 404 of FastAPI"


def _other_type(tasks: Sequence[str], model: str = "") -> dict[str, str]:
    return {f"test_pooling_not_supported[{task}{f'-{model}' if model else ''}]": ERROR_TYPE for task in tasks}


POOLING_FILES: dict[str, ServerFile] = {
    "pooling/basic/test_truncation.py": ServerFile(2, VECTORS, {"test_bigger_truncation_size": ERROR_TYPE}),
    "pooling/classify/test_online.py": ServerFile(
        9, CLASSES,
        {
            **dict.fromkeys((f"test_score[{_APEACH}]", f"test_rerank[{_APEACH}]"), _NO_ROUTE),
            **_other_type(("embed", "token_embed", "token_classify", "plugin"), _APEACH),
        },
        {"test_basic": VOCABULARY, "test_chat_request": VOCABULARY},
        num_left_out=2,
    ),
    "pooling/embed/test_cohere_online.py": ServerFile(30, VECTORS),
    "pooling/embed/test_cohere_openai_parity.py": ServerFile(3, VECTORS),
    "pooling/embed/test_online.py": ServerFile(
        13, VECTORS,
        {
            f"test_padding[{_E5}]": "`padding` is refused: texts are computed without padding",
            **_other_type(("classify", "token_classify", "token_embed", "plugin"), _E5),
        },
        dict.fromkeys(
            ("test_basic", "test_completion_request", "test_completion_request_batched", "test_chat_request"),
            VOCABULARY,
        ),
        num_left_out=4,
    ),
    "pooling/embed/test_online_dimensions.py": ServerFile(2, VECTORS),
    "pooling/token_classify/test_online.py": ServerFile(
        1, CLASSES, _other_type(("classify", "embed", "token_embed", "plugin"), _APEACH)
    ),
    "pooling/scoring/test_bi_encoder_online.py": ServerFile(
        12, {"*": "vectors768"}, _other_type(("classify", "token_classify", "plugin"))
    ),
    "pooling/scoring/test_cross_encoder_online.py": ServerFile(
        13, {"*": "pairs"},
        {
            **_other_type(("embed", "token_embed", "token_classify", "plugin")),
        },
        {"test_basic": VOCABULARY, "test_rerank_api_texts": ANSWER, "test_rerank_api_top_n": ANSWER},
        num_left_out=3,
    ),
}  # fmt: skip
