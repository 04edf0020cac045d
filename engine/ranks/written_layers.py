"""The layers of a step that all ranks have written: each is reported after the sum that follows its attention."""

from collections.abc import Callable

from devices.interface import Memory


class WrittenLayers:
    """One step's reports on one rank. A sum needs every rank's part, and each rank enqueues its part after its KV.

    On a device both the sum and the event that the pool records after it are only enqueued: readers of the layer wait
    for the event.
    """

    def __init__(self, pool: Memory | None, layer_done: Callable[[int], None] | None = None) -> None:
        self._mark: Callable[[], None] | None = getattr(pool, "written", None)
        self._layer_done = layer_done
        self._layer: int | None = None

    def __call__(self, layer: int) -> None:
        """Record the layer whose KV this rank has written."""
        self._layer = layer

    def after_sum(self) -> None:
        """Report the layer; called after each sum over the ranks."""
        layer, self._layer = self._layer, None
        if layer is None:
            return
        if self._mark is not None:
            self._mark()
        if self._layer_done is not None:
            self._layer_done(layer)
