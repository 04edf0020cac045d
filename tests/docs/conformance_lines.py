"""The lines of the request checklist in our words: what docs/conformance.md has a row for."""

LINES: dict[str, dict[int, str]] = {
    "a1": {
        1: "one request a line; blank lines are none", 2: "run-batch -i IN -o OUT --model M", 3: "both module forms",
        4: "a wrong command line is 2; a missing input is said before the model loads",
        5: "max_completion_tokens and max_tokens", 6: "the envelope of a line", 7: "the body of a chat",
        8: "url /v1/chat/completions", 9: "url /v1/embeddings", 10: "url /v1/score",
        11: "chats, vectors and scores mixed",
        12: "a line to another model is 404, on that line alone", 13: "an input at a URL", 14: "an output at a URL",
        15: "presigned URLs", 16: "the guides' script that signs them", 17: "--model --model X",
        18: "a gated model and a token", 19: "__version__", 20: "not the Batch REST API",
        21: "an unsupported url is that line's error", 22: "stream: true is that line's error",
        23: "an endpoint that the model lacks is that line's error",
        24: "a malformed line fails the run before the model loads; an empty file is answered by one",
    },
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
    "a6": {
        77: "from pdserve import LLM, SamplingParams; LLM(model=HF id or folder)", 78: "SamplingParams",
        79: "LLM.generate: the outputs in the order of the prompts",
        80: "output.prompt, output.outputs[0].text and token_ids",
    },
    "a8": {105: "USE_OPENAI=0: /generate", 106: "USE_OPENAI=0: /v1 is 404", 116: "combined and P/D say the same"},
    "a9": {
        120: "model", 121: "prompt", 122: "max_tokens", 123: "top_k", 124: "top_p", 125: "temperature", 126: "stop",
        127: "stream", 128: "n", 129: "use_beam_search", 130: "presence_penalty", 131: "frequency_penalty",
        132: "length_penalty", 133: "ignore_eos", 134: "guided_json", 135: "the guide's chat as printed",
    },
    "a10": {
        136: "P/D on Ascend NPUs over HCCL (on CPU tensors, gloo under HCCL's rules: no NPU was at hand)",
        137: "P/D on GPUs over NCCL (on CPU tensors, gloo under NCCL's rules: no GPU was at hand)",
        139: "ranktable gen as in the order leads to a cluster", 140: "pd_ranktable_tools in three forms",
        141: "start_servers.sh once per container", 142: "clients on the scheduler's port",
        143: "the packages of the order have a job", 144: "the folders of the order stand at the top",
        145: "every flag of vLLM 0.5 and 0.6 has a row",
    },
}  # fmt: skip
