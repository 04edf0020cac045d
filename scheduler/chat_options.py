"""How one conversation becomes a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a request says beside its messages. `template` is its own, which wins over the model's.

    `continue_final_message` leaves the last message open, for the model to write on; a caller refuses it together with
    `add_generation_prompt`. `add_special_tokens` adds those of the tokenizer to what the template wrote.
    """

    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    continue_final_message: bool = False
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
