"""Turn the pieces of one step into what the model computes and what the senders of held prompts are told."""

from engine.ending import banned_tokens
from engine.interface import Chunk, OnLayer, SampleRow, StepBatch
from engine.prompt import Prompt
from engine.roster import Piece


def batch_of(pieces: list[Piece]) -> StepBatch:
    """Return the flattened step: all tokens, each piece's part, and the rows that are sampled."""
    token_ids: list[int] = []
    samples: list[SampleRow] = []
    for piece in pieces:
        token_ids.extend(piece.sequence.next_tokens(piece.count))
        if piece.reaches_end:
            samples.extend(_sample_row(piece.prompt, index, len(token_ids) - 1) for index in piece.sampled)
    parts = tuple(piece.sequence.part(piece.count) for piece in pieces)
    return StepBatch(tuple(token_ids), parts, tuple(samples))


class Announcer:
    """Tells `on_layer` about the held prompts' chunks of one step; an error there is theirs alone, so it is kept."""

    def __init__(self, pieces: list[Piece], on_layer: OnLayer | None) -> None:
        self._chunks = tuple(_chunk_of(piece) for piece in pieces if piece.prompt.hold)
        self._on_layer = on_layer
        self.error: Exception | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anyone to tell; a layer without chunks is told too, as the mark of progress."""
        return self._on_layer is not None

    def __call__(self, layer: int) -> None:
        if self._on_layer is None or self.error is not None:
            return
        try:
            self._on_layer(layer, self._chunks)
        except Exception as error:  # noqa: BLE001 - ends the held prompts after the step, not the others
            self.error = error


def _sample_row(prompt: Prompt, index: int, row: int) -> SampleRow:
    sequence, params = prompt.sequences[index], prompt.state.params
    position = sequence.num_outputs
    return SampleRow(
        row, params, index, position, banned_tokens(params, position), sequence.token_ids, sequence.prompt_length
    )


def _chunk_of(piece: Piece) -> Chunk:
    sequence = piece.sequence
    end = sequence.num_computed + piece.count
    return Chunk(piece.prompt.state.prompt_id, sequence.num_announced, end, tuple(sequence.block_ids))
