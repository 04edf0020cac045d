"""The lines of the request checklist in our words: what docs/conformance.md has a row for."""

LINES: dict[str, dict[int, str]] = {
    "a2": {
        25: "serve MODEL --dtype auto --api-key KEY", 26: "python -m …entrypoints.openai.api_server --model M",
        27: "default port 8000; a port in use is an error in words", 28: "GET /v1/models",
        29: "POST /v1/chat/completions as printed", 30: "POST /v1/completions as printed",
        31: "another model's name is 404", 32: "keys by flag and environment", 33: "no key: any or none is taken",
        34: "the official client", 35: "the fields of OpenAI's chat", 36: "the fields of OpenAI's completions",
        37: "suffix is refused", 38: "tools are refused, never 500", 39: "extra fields by extra_body or merged JSON",
        40: "images are refused, never 500", 41: "start by Docker", 42: "models from ModelScope",
    },
    "a3": {
        43: "best_of", 44: "use_beam_search", 45: "top_k", 46: "min_p", 47: "repetition_penalty", 48: "length_penalty",
        49: "early_stopping", 50: "stop_token_ids", 51: "include_stop_str_in_output", 52: "ignore_eos",
        53: "min_tokens", 54: "skip_special_tokens", 55: "spaces_between_special_tokens", 56: "truncate_prompt_tokens",
        57: "prompt_logprobs", 58: "allowed_token_ids",
    },
    "a4": {
        59: "echo", 60: "add_generation_prompt", 61: "add_special_tokens", 62: "documents", 63: "chat_template",
        64: "chat_template_kwargs", 65: "response_format", 66: "guided_json", 67: "guided_regex", 68: "guided_choice",
        69: "guided_grammar", 70: "guided_decoding_backend", 71: "guided_whitespace_pattern", 72: "one way at a time",
    },
    "a5": {
        73: "the model's own template", 74: "--chat-template: a file or text", 75: "a model without a template",
        76: "templates that ship with us",
    },
    "a8": {105: "USE_OPENAI=0: /generate", 106: "USE_OPENAI=0: /v1 is 404", 116: "combined and P/D say the same"},
    "a9": {
        120: "model", 121: "prompt", 122: "max_tokens", 123: "top_k", 124: "top_p", 125: "temperature", 126: "stop",
        127: "stream", 128: "n", 129: "use_beam_search", 130: "presence_penalty", 131: "frequency_penalty",
        132: "length_penalty", 133: "ignore_eos", 134: "guided_json", 135: "the guide's chat as printed",
    },
}  # fmt: skip
