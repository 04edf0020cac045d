"""Graphs of torch.npu. Attention's lengths are host lists, which are passed to the graph before each replay.

    capture    every attention op becomes a task that waits for its own event
    replay     the previous replay is done -> update: each task gets its lengths, its event is recorded -> replay

A replay without an update would wait forever, and an update during a replay would change the running work.
"""

import weakref
from collections.abc import Callable
from typing import Any


class NpuGraphs:
    """Captures graphs of one device. Owns their stream and memory pool: one thread at a time uses them."""

    def __init__(self, npu: Any) -> None:
        """`npu` is torch.npu."""
        self._npu = npu
        self._stream = npu.Stream()
        self._pool: Any = None
        self._graphs: weakref.WeakSet[NpuGraph] = weakref.WeakSet()

    def capture(self, run: Callable[[], None]) -> "NpuGraph":
        """See Device. Other threads may keep using the device: only this thread's work is captured.

        torch_npu's allocator refuses a memory pool whose graphs are all gone (NPUCachingAllocator.cpp,
        create_or_incref_pool), so the next graph then gets a new one.
        """
        if not self._graphs:
            self._pool = self._npu.graph_pool_handle()
        npu, stream, current = self._npu, self._stream, self._npu.current_stream()
        stream.wait_stream(current)
        with npu.stream(stream):  # ops allocate on their first call, which a capture forbids
            run()
        current.wait_stream(stream)
        graph = npu.NPUGraph()
        with npu.graph(
            graph, pool=self._pool, stream=stream, auto_dispatch_capture=True, capture_error_mode="thread_local"
        ):
            run()
        made = NpuGraph(npu, graph)
        self._graphs.add(made)
        return made


class NpuGraph:
    """Implements Graph: replays on the thread's current stream."""

    def __init__(self, npu: Any, graph: Any) -> None:
        self._graph, self._ended = graph, npu.Event()
        self._lengths: dict[str, list[int]] = {}
        self._is_running = False

    def replay(self, host_lengths: dict[str, list[int]] | None = None) -> None:
        """See Graph. Blocks until the previous replay is done; without `host_lengths`, reuses that replay's lengths."""
        if self._is_running:
            self._ended.synchronize()
        if host_lengths is not None:
            self._lengths = host_lengths
        self._graph.update(cpu_update_input=[self._lengths])
        self._graph.replay()
        self._ended.record()
        self._is_running = True
