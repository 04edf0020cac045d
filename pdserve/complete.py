"""`pdserve complete`: continue texts with a served model, and stream the output."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.prompt_command import PromptCommand, prompt_parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = prompt_parser("complete", "Have a served model continue texts.", own_limit="16")
    arguments = parser.parse_args(argv)
    return PromptCommand(arguments).run(
        "/v1/completions", lambda text: {"prompt": text}, lambda text, answer: None, _choice_text
    )


def _choice_text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or "")
