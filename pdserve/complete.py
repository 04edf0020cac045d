"""`pdserve complete`: texts continued by a served model, as it writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.talk import Talk, talk_parser
from wire.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = talk_parser("complete", "Have a served model continue texts.")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of each (default: the server's, 16)")
    arguments = parser.parse_args(argv)
    most = arguments.max_tokens
    if most is not None and most < 1:
        raise ConfigError(f"--max-tokens {most}: at least 1")
    limit = {} if most is None else {"max_tokens": most}
    return Talk(arguments).go_on(
        "/v1/completions", lambda text: {"prompt": text, **limit}, lambda text, answer: None, _said
    )


def _said(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or "")
