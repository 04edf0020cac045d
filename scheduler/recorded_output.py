"""The whole output of a request, for callers that do not stream: vectors, checks, probes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.request import Dispatcher, GenerationRequest, PromptDone
from wire.types import TokenLogprobs, TokenOutput


@dataclass(slots=True)
class RecordedOutput:
    """A TokenSink that keeps everything; `outputs` by (prompt, sequence), the rest by prompt."""

    outputs: dict[tuple[int, int], list[TokenOutput]] = field(default_factory=dict)
    scored: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    rendered: dict[int, tuple[int, ...]] = field(default_factory=dict)
    vectors: dict[int, tuple[float, ...]] = field(default_factory=dict)
    done: dict[int, PromptDone] = field(default_factory=dict)

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Keep a token; all are wanted."""
        self.outputs.setdefault((prompt_index, token.sequence), []).append(token)
        return True

    def prompt_ids(self, prompt_index: int, token_ids: tuple[int, ...]) -> None:
        """Keep the ids of a prompt that a worker has rendered."""
        self.rendered[prompt_index] = token_ids

    def prompt_logprobs(self, prompt_index: int, tokens: Sequence[TokenLogprobs | None]) -> None:
        """Keep log probabilities."""
        self.scored.setdefault(prompt_index, []).extend(tokens)

    def vector(self, prompt_index: int, values: tuple[float, ...]) -> None:
        """Keep a vector."""
        self.vectors[prompt_index] = values

    def prompt_done(self, done: PromptDone) -> None:
        """Keep a report."""
        self.done[done.prompt_index] = done

    @property
    def tokens(self) -> dict[tuple[int, int], list[int]]:
        """The token ids by (prompt, sequence)."""
        return {
            key: [token.token_id for token in outputs if token.token_id is not None]
            for key, outputs in self.outputs.items()
        }


async def record(dispatcher: Dispatcher, request: GenerationRequest) -> RecordedOutput:
    """Run a request and return its output. Raises the error that failed it."""
    output = RecordedOutput()
    await dispatcher.run(request, output)
    return output
