"""Lines of the conformance checklist: section B, what users of today's vLLM rely on, and A11, its interpretations."""

SURFACES: dict[str, dict[int, str]] = {
    "B.text": {
        1: "completions: every field of the answer", 2: "chats: every field of the answer",
        3: "/v1/models: the card with all its fields", 4: "/v1/models/{id}",
    },
    "B.tokenizer": {
        1: "/tokenize of a prompt and of messages", 2: "/detokenize", 3: "return_token_strs",
        4: "add_special_tokens, add_generation_prompt, continue_final_message", 5: "/tokenizer_info by flag",
    },
    "B.ops": {
        1: "/health: 200, and 503 when the engine is dead", 2: "/metrics", 3: "/version", 4: "/ping", 5: "/load",
        6: "/openapi.json", 7: "/docs by flag", 8: "/server_info and /reset_prefix_cache by flag",
        9: "every route of vLLM 0.33 is served, or documented with the reason why not",
    },
    "B.tokens": {
        1: "/inference/v1/generate: ids, texts and log probabilities, whole and streamed",
        2: "a wrong field with its path",
    },
    "B.chat": {
        1: "max_completion_tokens wins over max_tokens", 2: "top_logprobs: null is 0, -1 is all where allowed",
        3: "seed: the bounds of int64", 4: "stop: at most four strings",
        5: "forced tool calls; bad tools refused with a message",
        6: "reasoning_effort and include_reasoning are accepted", 7: "chat_template and chat_template_kwargs",
        8: "continue_final_message, never together with add_generation_prompt", 9: "documents", 10: "echo",
        11: "messages[].reasoning and reasoning_content are one", 12: "unknown fields are ignored",
    },
    "B.tools": {
        1: "calls and results of a conversation, and tools, reach the chat template",
        2: "calls that the model decides on, in each format, whole and streamed", 3: "stop strings within a call",
        4: "a call cut by max_tokens", 5: "ids of calls are the same when a request is repeated",
        6: "a call goes on when its decode instance is killed", 7: "calls over workers, one of which fails",
        8: "calls in lines of a batch", 9: "right, cut and malformed texts as vLLM's and OpenAI's parsers read them",
        10: "tools with bad schemas, names or numbers are 400 with the path",
    },
    "B.reasoning": {
        1: "thinking before content and calls, in each format, whole and streamed",
        2: "as vLLM's and OpenAI's parsers find it, however cut", 3: "its tokens in usage",
        4: "thinking_token_budget, also after a hand-off or a retry", 5: "a form or a forced call after it",
        6: "include_reasoning and separate_reasoning",
    },
    "B.completion": {
        1: "four forms of a prompt, choices prompt-major", 2: "echo with logprobs; max_tokens 0 is the prompt alone",
        3: "max_tokens null is 16", 4: "best_of", 5: "truncation_side", 6: "bad_words", 7: "an empty prompt is 400",
        8: "a token id out of the vocabulary is 400 and named",
    },
    "B.limits": {
        1: "penalties in [-2, 2]", 2: "repetition_penalty above 0 and finite",
        3: "temperature in [0, 2], below 0.01 it is 0.01", 4: "top_p in (0, 1]", 5: "top_k -1, 0 (off) or more",
        6: "min_p in [0, 1]", 7: "min_tokens within max_tokens", 8: "logprobs within --max-logprobs",
        9: "bad_words are not empty", 10: "logit_bias: clamped; bad keys all named at once; ids in the vocabulary",
    },
    "B.generation": {
        1: "the guide's table unless the operator says otherwise", 2: "auto: the model's own, and a request's wins",
        3: "--override-generation-config wins over the model's",
    },
    "B.stream": {
        1: "the first chunk of a choice has the role and no text", 2: "one id, created and model in all chunks",
        3: "a chunk has no field that was not requested", 4: "one finish_reason per choice, with its last text",
        5: "[DONE] is last", 6: "an error in the middle is an event and the end of the stream",
        7: "keep-alive comments by flag",
    },
    "B.usage": {
        1: "stream_options only with stream", 2: "include_usage: one more chunk without choices",
        3: "continuous_usage_stats: counts in every chunk, never smaller, with include_usage",
        4: "else no usage anywhere", 5: "--enable-force-include-usage and --enable-prompt-tokens-details",
        6: "--enable-per-request-metrics",
    },
    "B.logprobs": {
        1: "chats: token, logprob, bytes and exactly top_logprobs others",
        2: "completions: N to N+1 names a position, the first of an echo is null", 3: "minus infinity is -9999.0",
        4: "text_offset continues across a stream's chunks", 5: "token_id:N by flag and by field; return_token_ids",
    },
    "B.finish": {
        1: "stop and length", 2: "stop_reason: the text, the token id, or null at the model's end",
        3: "abort of those that were cancelled, in the metrics",
    },
    "B.structured": {
        1: "structured_outputs: exactly one kind", 2: "response_format: text, json_object, json_schema",
        3: "structural_tag", 4: "guided_* beside them", 5: "nested 64 deep at most",
        6: "whitespace_pattern and disable_any_whitespace",
    },
    "B.errors": {
        1: "one nested envelope", 2: "a wrong field is 400 with its path, never 422",
        3: "no paths, addresses or long inputs in messages", 4: "404", 5: "401", 6: "405", 7: "413",
        8: "415 and 400 by type", 9: "500 without internals", 10: "429 and 503 with Retry-After",
        11: "a route that the model cannot answer is refused with a message",
        12: "a prompt longer than the model names the maximum context length",
        13: "nothing that a client sends is a server error",
    },
    "B.headers": {
        1: "X-Request-Id ends the answer's id and is echoed", 2: "CORS flags", 3: "--root-path", 4: "TLS flags",
    },
    "B.cancel": {
        1: "a client that disconnects ends its request, streamed or not", 2: "its blocks are free on P and on D",
    },
    "B.shutdown": {
        1: "on SIGTERM new requests are 503", 2: "those that run may finish for --shutdown-timeout",
        3: "no process is left",
    },
    "B.metrics": {
        1: "the vllm: names of requests, tokens and times", 2: "those of loads, caches and preemptions",
        3: "http_requests_total", 4: "our own names, of each role and of the hand-off",
    },
    "B.clients": {
        1: "the official openai client", 2: "lm-eval: loglikelihoods are those of the model itself",
        3: "lm-eval: texts and chats", 4: "the official anthropic client",
        5: "the official openai client's Responses API", 6: "langchain-openai, by the suite of langchain-tests",
        7: "litellm: hosted_vllm, rerank, and Anthropic's messages", 8: "pydantic-ai", 9: "openai-agents",
        10: "huggingface_hub", 11: "guidellm", 12: "instructor",
    },
    "B.messages": {
        1: "/v1/messages: blocks, whole and streamed, with stop reasons", 2: "tools and forced calls",
        3: "thinking", 4: "system, results of calls, and the beginning of the answer", 5: "a wrong field with its path",
        6: "Anthropic's types of errors, and errors in the middle of a stream",
        7: "count_tokens, and usage with what was cached",
    },
    "B.responses": {
        1: "/v1/responses: items, whole and streamed, each event of the official type", 2: "function calls, forced too",
        3: "reasoning", 4: "items, instructions and tools become the same chat", 5: "a wrong field with its path",
        6: "text.format", 7: "status, usage and log probabilities", 8: "truncation",
        9: "an error in the middle of a stream is a failed response", 10: "store and retrieve",
        11: "previous_response_id", 12: "input_items, page by page", 13: "delete, and only by its owner",
        14: "background and cancel", 15: "the events of a background stream, from any of them on",
        16: "a store that fails or is full, and what a killed process left",
        17: "the public compliance cases",
    },
    "B.pooling": {
        1: "/v1/embeddings", 2: "/v1/score and /score, in each spelling", 3: "/rerank, /v1/rerank and /v2/rerank",
        4: "/pooling", 5: "/classify", 6: "/v2/embed",
    },
}  # fmt: skip

READINGS: dict[int, str] = {
    1: "n above 1 needs sampling, except with beam search (lines 43, 128)",
    2: "n = 2 with top_k 1 is greedy: 400 (line 128)",
    3: "both the served name and the value of --model are accepted as model (lines 120, 135)",
    4: "without --served-model-name the model's id is the value of --model (line 120)",
    5: "the number of beams is best_of, else n; 1 and less are 400 (line 129)",
    6: "beam search with temperature 0 and without n is accepted (line 132)",
    7: "defaults are the guide's table; --generation-config auto takes the model's",
    8: "a checkpoint with .bin files only is converted once, in a separate process, with a notice",
    9: "other pickles are refused", 10: "a request without a model uses the served one (line 120)",
    11: "max_tokens 0 is accepted only with echo or prompt_logprobs (line 122)",
    12: "max_tokens is 16 by default on completions and /generate, the rest of the context on chats (line 122)",
    13: "image parts are refused: 400 with a message (line 40)",
    14: "the scheduler accepts all engine flags (line 113)",
    15: "--max-num-batched-tokens below --max-model-len ends a start by start_servers.sh (line 112)",
    16: "differing tables are an error at the start and a warning on a live change (line 98)",
    17: "two tables of the same name are an error, and nothing is written (line 88)",
    18: "--mode accepts merge-local too; any other value is a usage error (lines 82, 140)",
    19: "the same port twice is an error only on the same host (line 108)",
    20: "no device is used by two containers (line 119)",
    21: "unequal tensor parallelism is a note, with --strict an error (line 91)",
}  # fmt: skip
