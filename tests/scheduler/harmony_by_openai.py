"""Write what OpenAI's own harmony parser reads in generated answers, right, cut and malformed, as a table.

    TIKTOKEN_ENCODINGS_BASE=FOLDER PYTHON tests/scheduler/harmony_by_openai.py > tests/scheduler/harmony_by_openai.json

Run with openai-harmony 0.0.8. FOLDER has its vocabulary, o200k_base.tiktoken, whose digest the package checks; npm's
js-tiktoken has the same ranks. The table has facts only; the tests compare scheduler/tools/parsers/harmony.py with it.
"""

import json
import random
from typing import Any

CALL_HEADERS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{} json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    "<|channel|>analysis to=functions.{} code<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary<|message|>",
)
NAMES = ("weather", "get_time", "f-1", "web.search")
ARGUMENTS = (
    '{"city": "Paris"}', "{}", "", '{"text": "東京 é 😀", "n": [1, {"a": "}"}]}', '{\n "a": "line\\nbreak"\n}',
    "not json", '{"a": "<b> to=functions.x </b>"}',
)  # fmt: skip
TEXTS = ("Hello.", "", "東京 é 😀\n\n1 < 2", "to=functions.f", "final", " <|", "A\nB\n")
BUILT_IN = (
    "<|channel|>analysis to=python code<|message|>", "<|channel|>analysis to=browser.search<|message|>",
    "<|channel|>commentary to=container.exec<|message|>",
)  # fmt: skip
MALFORMED = (
    "Hello", "<|channel|>", "<|message|>Hello", "<|channel|>final Hello",
    "<|channel|>final<|channel|>final<|message|>a",
    "<|channel|>final<|message|>One.<|channel|>final<|message|> Two.", "<|end|><|end|>", "<|start|>",
    "<|channel|>final<|message|>a<|message|>b", "<|channel|>other<|message|>a", "<|message|>",
    "<|channel|>commentary to=<|message|>a", "<|channel|>commentary to=functions.<|message|>{}<|call|>",
    "<|channel|>final<|message|>a<|end|>b", "<|call|><|channel|>final<|message|>a",
    "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>",
)  # fmt: skip


def right_texts() -> list[str]:
    """Return answers as the model writes them: after the prompt's <|start|>assistant."""
    chance = random.Random(0)
    texts = []
    for _ in range(60):
        messages = []
        for _ in range(chance.choice((0, 1, 1, 2))):
            messages.append(f"<|channel|>analysis<|message|>{chance.choice(TEXTS)}<|end|>")
        kind = chance.choice(("final", "call", "calls", "preamble", "built-in"))
        if kind in ("preamble", "final"):
            messages.append(f"<|channel|>commentary<|message|>{chance.choice(TEXTS)}<|end|>" * (kind == "preamble"))
        if kind == "built-in":
            messages.append(f"{chance.choice(BUILT_IN)}{chance.choice(ARGUMENTS)}<|call|>")
        for _ in range({"call": 1, "preamble": 1, "calls": 2}.get(kind, 0)):
            header = chance.choice(CALL_HEADERS).format(chance.choice(NAMES))
            messages.append(f"{header}{chance.choice(ARGUMENTS)}<|call|>")
        if kind == "final":
            messages.append(f"<|channel|>final<|message|>{chance.choice(TEXTS)}<|return|>")
        texts.append("<|start|>assistant".join(message for message in messages if message))
    return list(dict.fromkeys(texts))


def read(encoding: Any, token_ids: list[int]) -> list[Any] | None:
    """Return channel, recipient and text of each message, the begun one last; None where it raises an error."""
    from openai_harmony import HarmonyError, Role, StreamableParser  # type: ignore[import-not-found]

    parser = StreamableParser(encoding, Role.ASSISTANT)
    try:
        for token_id in token_ids:
            parser.process(token_id)
        parser.process_eos()
    except HarmonyError:
        return None
    return [[one.channel, one.recipient, "".join(part.text for part in one.content)] for one in parser.messages]


def main() -> None:
    """Print the table."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    chance, right = random.Random(1), right_texts()
    cut = []
    for text in right:
        token_ids = encoding.encode(text, allowed_special="all")
        cut += [encoding.decode(token_ids[: chance.randrange(1, len(token_ids))]) for _ in range(3)]
    rows = []
    for group, texts in (("right", right), ("cut", list(dict.fromkeys(cut))), ("malformed", MALFORMED)):
        for text in texts:
            messages = read(encoding, encoding.encode(text, allowed_special="all"))
            rows.append({"text": text, "group": group, "messages": messages})
    print("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]")


if __name__ == "__main__":
    main()
