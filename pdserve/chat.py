"""`pdserve chat`: a conversation with a served model, with streamed answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.prompt_command import PromptCommand, prompt_parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = prompt_parser("chat", "Chat with a served model.", own_limit="the rest of the context")
    parser.add_argument("--system-prompt", metavar="TEXT", help="text of a first message with the role `system`")
    arguments = parser.parse_args(argv)
    conversation = _Conversation(arguments.system_prompt)
    return PromptCommand(arguments).run(
        "/v1/chat/completions", conversation.body, conversation.remember, _delta_text, _delta_thinking
    )


class _Conversation:
    """The messages so far. An interrupted answer is not remembered."""

    def __init__(self, system: str | None) -> None:
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def body(self, text: str) -> dict[str, Any]:
        """Return the request body for the next user message `text`."""
        return {"messages": [*self._messages, {"role": "user", "content": text}]}

    def remember(self, text: str, answer: str) -> None:
        """Append the user's message and the model's answer."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def _delta_text(choice: Mapping[str, Any]) -> str:
    return str((choice.get("delta") or {}).get("content") or "")


def _delta_thinking(choice: Mapping[str, Any]) -> str:
    """Return the thinking from vLLM's field, or from the older field of other servers."""
    delta = choice.get("delta") or {}
    return str(delta.get("reasoning") or delta.get("reasoning_content") or "")
