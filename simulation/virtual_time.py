"""An event loop on a virtual clock: when nothing is ready, its time jumps to the next timer."""

import asyncio
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` advances only to its next timer."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("no timer and nothing ready: this would wait forever")
        if not ready and timeout is not None and timeout > 0:
            self._loop.now += timeout
        return ready
