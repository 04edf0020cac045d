"""Kimi K2: a section of calls between markers that are special tokens; the model writes each call's id.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

The chat template shows ids to the model, so they are the calls' ids in the answer.
"""

from scheduler.tools.section_calls import SectionCalls

ARGUMENTS = "<|tool_call_argument_begin|>"

KIMI_K2 = SectionCalls(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=[{<])",
)
