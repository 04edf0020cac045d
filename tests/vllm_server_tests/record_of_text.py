"""The record of vLLM's tests of routes that generate text, and of those for every model."""

from tests.vllm_server_tests.server_file import (
    ANSWER,
    SCRIPTED,
    SMALL,
    VECTORS,
    WORDS,
    ServerFile,
)

_CHAT = "openai/chat_completion/"
_TRANSFER = "`kv_transfer_params` belongs to the cluster: clients may not set it"
_ORCA = "the header `endpoint-load-metrics` (ORCA) is not sent"
_REQUEST_ID = "`X-Request-Id` is always sent, and begins with `req-`"

TEXT_FILES: dict[str, ServerFile] = {
    "anthropic/test_messages.py": ServerFile(
        5, SCRIPTED,
        {"test_anthropic_streaming_cache_usage": "`cache_creation_input_tokens` is 0: what is cached is not counted"},
        {"test_anthropic_structured_output": ANSWER},
        num_left_out=1,
    ),
    f"{_CHAT}test_chat_completion.py": ServerFile(
        6,
        failing={
            "test_kv_transfer_prompt_token_ids_round_trip": _TRANSFER,
            "test_kv_transfer_prompt_token_ids_streaming": _TRANSFER,
        },
    ),
    f"{_CHAT}test_chat_logit_bias_validation.py": ServerFile(5),
    f"{_CHAT}test_enable_force_include_usage.py": ServerFile(1),
    f"{_CHAT}test_include_reasoning.py": ServerFile(6, SCRIPTED),
    f"{_CHAT}test_logprob_token_ids.py": ServerFile(5),
    f"{_CHAT}test_root_path.py": ServerFile(4, SMALL),
    f"{_CHAT}test_thinking_token_budget.py": ServerFile(
        6, SCRIPTED,
        left_out={
            "test_thinking_token_budget_qwen35_fp8_mtp_concurrent_mixed_budget_and_plain": "it needs two GPUs",
        },
        num_left_out=1,
    ),
    "openai/completion/test_completion.py": ServerFile(22),
    "openai/completion/test_prompt_validation.py": ServerFile(1, failing={"test_empty_prompt": WORDS}),
    "openai/test_chunked_prompt.py": ServerFile(2),
    "openai/test_return_token_ids.py": ServerFile(
        4, SMALL,
        left_out=dict.fromkeys(
            ("test_chat_completion_with_tool_use", "test_comparison_with_prompt_logprobs_and_logprobs"), ANSWER
        ),
        num_left_out=2,
    ),
    "openai/responses/test_basic.py": ServerFile(
        3, SCRIPTED,
        left_out={"test_simple_input": ANSWER, "test_instructions": ANSWER, "test_chat": ANSWER},
        num_left_out=3,
    ),
    "openai/responses/test_simple.py": ServerFile(
        9, SCRIPTED,
        {
            "test_enable_response_messages[Qwen/Qwen3-8B]": (
                "`enable_response_messages` is refused: `/tokenize` returns a conversation's tokens"
            )
        },
    ),
    "openai/responses/test_stateful.py": ServerFile(
        1, SCRIPTED,
        dict.fromkeys(("test_store", "test_background_error", "test_cancel_completed"), WORDS),
        {
            "test_background": "it needs an answer in its first second: later one is `in_progress`, in vLLM `queued`",
            **dict.fromkeys(("test_previous_response_id", "test_two_responses_with_same_prev_id"), ANSWER),
        },
        num_left_out=3,
    ),
    "serve/instrumentator/test_basic.py": ServerFile(
        4, left_out={"test_show_version": "the version is pdserve's own"}, num_left_out=1
    ),
    "serve/instrumentator/test_orca_metrics.py": ServerFile(
        1,
        failing={
            "test_chat_completion_with_orca_header[True]": _ORCA,
            "test_completion_with_orca_header[True]": _ORCA,
        },
    ),
    "serve/middleware/test_optional_middleware.py": ServerFile(
        7, VECTORS,
        {
            "test_no_request_id_header": _REQUEST_ID,
            "test_enable_request_id_header[--enable-request-id-headers]": _REQUEST_ID,
        },
    ),
    "serve/tokenize/test_tokenization.py": ServerFile(9, SMALL),
}  # fmt: skip
