"""The format of tool calls that a chat template shows to the model, by its markers. Pure."""

_SIGNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>", "arguments"), ("<arg_key>", "<function=", "<tool_sep>", "<tool_calls>")),
    "qwen3_coder": (("<tool_call>", "<function=", "<parameter="), ()),
    "glm45": (("<tool_call>", "<arg_key>", "<arg_value>"), ("<tool_sep>",)),
    "llama3_json": (('{"name": function name, "parameters"',), ()),
    "pythonic": (("[func_name1(",), ()),
    "mistral": (("[TOOL_CALLS]",), ()),
    "deepseek_v3": (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"), ()),
    "deepseek_v31": (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), ("```json",)),
    "openai": (("<|start|>", "<|channel|>", "<|message|>"), ()),
    "kimi_k2": (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), ()),
}
"""The texts that a template of each format has, and those that it does not have."""


def format_of_template(template: str | None) -> str | None:
    """Return the name of the format whose texts a template has; None if it has those of no format or of several."""
    if template is None:
        return None
    found = [
        name
        for name, (present, absent) in _SIGNS.items()
        if all(text in template for text in present) and not any(text in template for text in absent)
    ]
    return found[0] if len(found) == 1 else None
