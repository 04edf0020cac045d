"""`pdserve chat`: a conversation with a served model, its answers as they come."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.prompt_command import PromptCommand, talk_parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = talk_parser("chat", "Chat with a served model.", own_limit="all the context that is left")
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before all else")
    arguments = parser.parse_args(argv)
    conversation = _Conversation(arguments.system_prompt)
    return PromptCommand(arguments).go_on("/v1/chat/completions", conversation.body, conversation.hear, _said)


class _Conversation:
    """What was said so far. An answer that was broken off counts as far as it came."""

    def __init__(self, system: str | None) -> None:
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def body(self, text: str) -> dict[str, Any]:
        """Return what asks for an answer to `text`, after all that was said."""
        return {"messages": [*self._messages, {"role": "user", "content": text}]}

    def hear(self, text: str, answer: str) -> None:
        """Remember both."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def _said(choice: Mapping[str, Any]) -> str:
    return str((choice.get("delta") or {}).get("content") or "")
