"""Graphs of torch.npu: attention's lengths are lists of the host, which each replay hands to the graph anew.

    capture    every attention op becomes a task that waits for an event of its own
    replay     the last replay has ended -> update: each task gets its lengths, its event is recorded -> replay

So a replay without an update would wait for ever, and an update during a replay would change what runs.
"""

from collections.abc import Callable
from typing import Any


class NpuGraphs:
    """Captures graphs of one device. Owner of their stream and memory: one thread captures and replays."""

    def __init__(self, npu: Any) -> None:
        """`npu` is torch.npu."""
        self._npu = npu
        self._stream = npu.Stream()
        self._pool = npu.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> "NpuGraph":
        """See Device. Other threads may go on with their own work on the device: only this one's is captured."""
        npu, stream, current = self._npu, self._stream, self._npu.current_stream()
        stream.wait_stream(current)
        with npu.stream(stream):  # the ops' first calls allocate, which a capture must not
            run()
        current.wait_stream(stream)
        graph = npu.NPUGraph()
        with npu.graph(
            graph, pool=self._pool, stream=stream, auto_dispatch_capture=True, capture_error_mode="thread_local"
        ):
            run()
        return NpuGraph(npu, graph)


class NpuGraph:
    """Implements Graph: replays on the thread's current stream."""

    def __init__(self, npu: Any, graph: Any) -> None:
        self._graph, self._ended = graph, npu.Event()
        self._lengths: dict[str, list[int]] = {}
        self._is_running = False

    def replay(self, host_lengths: dict[str, list[int]] | None = None) -> None:
        """See Graph. Blocks until the last replay has ended; without lengths those of the last replay hold."""
        if self._is_running:
            self._ended.synchronize()
        if host_lengths is not None:
            self._lengths = host_lengths
        self._graph.update(cpu_update_input=[self._lengths])
        self._graph.replay()
        self._ended.record()
        self._is_running = True
