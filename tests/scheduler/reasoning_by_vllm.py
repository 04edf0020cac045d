"""Write what vLLM's own reasoning parsers make of generated texts, whole and token by token, as a table.

    PYTHON_OF_VLLM tests/scheduler/reasoning_by_vllm.py > tests/scheduler/reasoning_by_vllm.json

Run with vLLM 0.32.0. The table has facts only; the tests compare scheduler/reasoning/parser.py with it.
"""

import json
import random
import re
import sys
from typing import Any

MARKERS = {
    "deepseek_r1": ("<think>", "</think>"), "qwen3": ("<think>", "</think>"), "glm45": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"), "granite": ("Here is my thought process:", "Here is my response:"),
}  # fmt: skip
SPECIAL = ("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|im_end|>")
OTHERS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|user|>", "<|observation|>", "<|assistant|>")
THOUGHTS = (
    "", "Hm", "\nLet me see: 1 < 2.\n", "東京 é 😀", "a </thin", "Here is my", " \n ", "[/THI", "x\n\ny", "tool_call>",
)  # fmt: skip
ANSWERS = ("", "Yes.", "\n\nIt is 4.", "東京 é 😀", "<b>é</b> \n ", "<think", "Here's", "\n")


def texts(start: str, end: str) -> list[str]:
    """Return right texts, cut ones, and some with markers too many or too few."""
    chance = random.Random(start)
    right = [
        chance.choice((start, start, "")) + chance.choice(THOUGHTS) + chance.choice((end, end, end, ""))
        + chance.choice(ANSWERS)
        for _ in range(40)
    ]  # fmt: skip
    cut = [text[: chance.randrange(1, len(text))] for text in right if len(text) > 1][:20]
    other = [
        "Hello.", start, end, start + end, end + "a", f"{start}a{end}b{end}c", f"{start}a{end}b{start}c{end}d",
        f"{start}a{start}b{end}c", f"a{start}b{end}c", f" {start}a{end}", f"{start}a{end}{end}\n", f"a{end}{start}",
        f"{start}a \n{end} b", f"{end}{end}",
    ]  # fmt: skip
    return list(dict.fromkeys([*right, *cut, *other]))


class Tokenizer:
    """As much of a tokenizer as the parsers use: a token for each marker, else one for each character."""

    chat_template = None

    def __init__(self) -> None:
        self._ids = {text: at for at, text in enumerate((*SPECIAL, *OTHERS), 10)}

    def get_vocab(self) -> dict[str, int]:
        """Return the markers' ids."""
        return self._ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""
        texts = {token_id: text for text, token_id in self._ids.items()}
        return "".join(texts.get(one) or chr(one - 1000) for one in token_ids)

    def encode_tokens(self, text: str) -> list[tuple[str, int]]:
        """Return the text and the id of each token."""
        pieces = re.split("(" + "|".join(map(re.escape, self._ids)) + ")", text)
        tokens = [[piece] if piece in self._ids else list(piece) for piece in pieces]
        return [(one, self._ids.get(one, 1000 + ord(one[0]))) for many in tokens for one in many]


def main() -> None:
    """Write the table to standard output, a line for each text."""
    from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]

    rows = []
    for name, (start, end) in MARKERS.items():
        kind = ReasoningParserManager.get_reasoning_parser(name)
        for text in texts(start, end):
            whole = kind(Tokenizer()).extract_reasoning(text, None)
            rows.append({"name": name, "text": text, "whole": [one or "" for one in whole], **_streamed(kind, text)})
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    sys.stdout.write(f"[\n{lines}\n]\n")


def _streamed(kind: Any, text: str) -> dict[str, Any]:
    parser, split = kind(Tokenizer()), ["", ""]
    tokens = Tokenizer().encode_tokens(text)
    ids = [token_id for _, token_id in tokens]
    deltas, at = [], 0
    for number, (one, token_id) in enumerate(tokens):
        before = text[:at]
        at += len(one)
        deltas.append(
            parser.extract_reasoning_streaming(before, text[:at], one, ids[:number], ids[: number + 1], [token_id])
        )
    finish = getattr(parser, "finish_streaming", None)
    deltas.append(finish() if finish is not None else None)
    for delta in deltas:
        if delta is not None:
            split[0] += delta.reasoning or ""
            split[1] += delta.content or ""
    return {"streamed": split, "num_tokens": parser.count_reasoning_tokens(ids)}


if __name__ == "__main__":
    main()
