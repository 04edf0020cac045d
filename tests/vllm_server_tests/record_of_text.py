"""The record of vLLM's tests of routes that generate text, and of those for every model."""

from tests.vllm_server_tests.server_file import (
    ADAPTERS,
    ANSWER,
    IMAGES,
    ROUTES,
    SCRIPTED,
    SMALL,
    TINY,
    VECTORS,
    VOCABULARY,
    WORDS,
    ServerFile,
)

_CHAT = "openai/chat_completion/"
_TRANSFER = "`kv_transfer_params` belongs to the cluster: clients may not set it"
_WATERMARK = "it starts its server with --watermark-config, which is refused: outputs have no watermark"
_TOKENS_ONLY = "it starts its server with --tokens-only, which is refused: the scheduler needs a tokenizer"
_BASE, _ADAPTER = "[HuggingFaceH4/zephyr-7b-beta]", "[zephyr-lora]"

TEXT_FILES: dict[str, ServerFile] = {
    "anthropic/test_messages.py": ServerFile(7, SCRIPTED),
    "launchers/api_server/test_multi_api_servers.py": ServerFile(2),
    "launchers/test_shutdown.py": ServerFile(7),
    f"{_CHAT}test_chat.py": ServerFile(
        21, SCRIPTED,
        left_out={
            f"test_single_chat_session{_BASE}": VOCABULARY,
            **{
                f"test_{name}{_ADAPTER}": ADAPTERS
                for name in (
                    "no_logprobs_chat", "zero_logprobs_chat", "some_logprobs_chat", "too_many_chat_logprobs",
                    "single_chat_session", "chat_streaming", "chat_completion_stream_options",
                )
            },
            **dict.fromkeys(
                (
                    "test_more_than_one_prompt_logprobs_chat", "test_structured_outputs_choice_chat",
                    "test_structured_outputs_json_chat", "test_response_format_json_object",
                    "test_response_format_json_schema", "test_complex_message_content",
                    "test_chat_completion_n_parameter_non_streaming",
                ),
                ANSWER,
            ),
        },
        num_left_out=15,
    ),
    f"{_CHAT}test_chat_echo.py": ServerFile(4, TINY),
    f"{_CHAT}test_completion_with_function_calling.py": ServerFile(
        17, SCRIPTED,
        left_out={"test_function_tool_use[watermarked": _WATERMARK, "test_named_tool_use": ANSWER},
        num_left_out=13,
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
    "openai/test_openai_schema.py": ServerFile(1, IMAGES),
    "openai/test_return_tokens_as_ids.py": ServerFile(4),
    "openai/responses/test_function_call.py": ServerFile(
        12, SCRIPTED,
        left_out=dict.fromkeys(
            (
                "test_function_calling_with_streaming_expected_arguments",
                "test_function_calling_with_streaming_forced_tool_choice[auto",
            ),
            ANSWER,
        ),
        num_left_out=2,
    ),
    "openai/responses/test_basic.py": ServerFile(
        3, SCRIPTED,
        left_out={"test_simple_input": ANSWER, "test_instructions": ANSWER, "test_chat": ANSWER},
        num_left_out=3,
    ),
    "openai/responses/test_simple.py": ServerFile(10, SCRIPTED),
    "openai/responses/test_stateful.py": ServerFile(
        4, SCRIPTED,
        left_out={
            "test_background": "it needs an answer in its first second: later one is `in_progress`, in vLLM `queued`",
            **dict.fromkeys(("test_previous_response_id", "test_two_responses_with_same_prev_id"), ANSWER),
        },
        num_left_out=3,
    ),
    "serve/instrumentator/test_basic.py": ServerFile(
        4, left_out={"test_show_version": "the version is pdserve's own"}, num_left_out=1
    ),
    "serve/instrumentator/test_metrics.py": ServerFile(
        15, {"*": "deep", "HuggingFaceTB/SmolVLM-256M-Instruct": "deep images"},
        left_out={
            f"test_metrics_counts[{flag}-multimodal]": "it skips them itself"
            for flag in ("", "--enable-chunked-prefill", "--show-hidden-metrics-for-version=0.32")
        },
        num_left_out=3,
        ways=("combined",),
    ),
    "serve/instrumentator/test_orca_metrics.py": ServerFile(3),
    "serve/middleware/test_optional_middleware.py": ServerFile(9, VECTORS),
    "scale_out/token_in_token_out/test_serving_tokens.py": ServerFile(
        14,
        failing={
            "test_text_mode_invalid_requests_return_400[derender-stream]": WORDS,
        },
        left_out={
            "test_generate_sampling_mask": "it starts its server with --return-sampling-mask, which is refused",
            "test_stop_string_workflow": ANSWER,
            "test_stop_strings_rejected_when_tokens_only": _TOKENS_ONLY,
            "test_text_mode_rejected_when_tokens_only": _TOKENS_ONLY,
            "test_generate_with_lora_adapter": ADAPTERS,
            **dict.fromkeys(
                (
                    "test_render_then_generate_forwards_reasoning_parser_kwargs",
                    "test_render_then_generate_forwards_reasoning_ended",
                    "test_derender_mode_without_parser_returns_text_message",
                    "test_derender_mode_with_parser_matches_chat_completions",
                    "test_stream_delivers_abort_finish_chunk", "test_abort_requests_is_served_without_tokens_only",
                ),
                ROUTES,
            ),
        },
        num_left_out=12,
    ),
    "serve/tokenize/test_tokenization.py": ServerFile(9, SMALL),
    "serve/tokenize/test_tokenize_then_chat_vlm.py": ServerFile(1, IMAGES),
    "multimodal/openai/chat_completion/test_vision.py": ServerFile(
        21, IMAGES,
        left_out={
            "test_single_chat_session_image": VOCABULARY,
            "test_single_chat_session_image_base64encoded": VOCABULARY,
            "test_single_chat_session_image_base64encoded_beamsearch": ANSWER,
        },
        num_left_out=24,
    ),
    "multimodal/openai/responses/test_image.py": ServerFile(10, IMAGES),
}  # fmt: skip
