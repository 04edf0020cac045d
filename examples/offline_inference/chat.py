"""Answer conversations with an engine in this process: `python examples/offline_inference/chat.py --help`."""

from pathlib import Path
from typing import Any

from pdserve import LLM, EngineArgs, FlexibleArgumentParser

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And which river flows through it?"},
]
SAMPLING = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int}


def flags() -> dict[str, Any]:
    """Return the command line's values: every keyword of LLM, and the parameters of this script."""
    parser = FlexibleArgumentParser(description="Answer one conversation, then ten at once.")
    EngineArgs.add_cli_args(parser)
    group = parser.add_argument_group("sampling")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--chat-template-path", help="file of a Jinja template to use instead of the model's")
    return vars(parser.parse_args())


def main() -> None:
    """Answer, and print each answer."""
    given = flags()
    sampling = {name: given.pop(name) for name in SAMPLING}
    path = given.pop("chat_template_path")
    llm = LLM(**given)
    params = llm.get_default_sampling_params()
    for name, value in sampling.items():
        if value is not None:
            setattr(params, name, value)

    template = None if path is None else Path(path).read_text(encoding="utf-8")
    for conversations in ([CONVERSATION], [CONVERSATION] * 10):
        for output in llm.chat(conversations, params, chat_template=template):
            print(f"answer: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
