"""The engine's Model on torch and transformers: weights, paged pool, attention and sampler of one rank."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from devices.cpu import CpuDevice
from devices.interface import Device, Memory
from devices.liveness import in_a_line
from devices.polling import wait_until
from engine.attention.block_tables import DecodeInputs
from engine.attention.interface import AttentionBackend, StepAttention
from engine.attention.paged import LayerPool, PagedAttention
from engine.attention.registered import attach
from engine.decode_graphs import DecodeGraphs, ShapeOwner
from engine.device_output import DeviceStep
from engine.fused.decoder import FusedDecoder, FusedWeights
from engine.interface import EngineInfo
from engine.kv.block_store import BlockStore
from engine.kv.device_block_store import DeviceBlockStore
from engine.rope import StepRope
from engine.row_head import RowHead
from engine.sampling.logprobs import rows_at_once
from engine.sampling.sampler import Nucleus, TorchChooser
from engine.step import PendingStep, PoolingRows, StepBatch, StepOutput
from engine.step_limit import DEFAULT_STEP_S, queued_s
from engine.step_metadata import StepMetadata, build
from engine.step_output import make_output
from engine.transfers import upload, upload_ints
from native import move_library
from wire.errors import InstanceLost, InternalError

if TYPE_CHECKING:
    from engine.ranks.reduce import Reduce


@dataclass(frozen=True, slots=True)
class DoneStep:
    """Implements PendingStep: a step computed at launch, as on CPUs."""

    output: StepOutput

    def collect(self) -> StepOutput:
        """Return the step's output."""
        return self.output


class TorchModel:
    """Runs steps on one device. Owns the pool and the tensors over it; one thread calls it."""

    def __init__(
        self,
        network: Any,
        *,
        info: EngineInfo,
        memory: Memory,
        backend: AttentionBackend,
        keeps_logits: bool,
        rope: StepRope | None = None,
        fused: FusedWeights | None = None,
        reduce: "Reduce | None" = None,
        device: Device | None = None,
        graph_rows: int = 0,
        step_s: float = DEFAULT_STEP_S,
        nucleus: Nucleus | None = None,
    ) -> None:
        """`network` is the transformers model with our attention; `keeps_logits`: it accepts `logits_to_keep`.

        `rope` gets the lengths of each step's rows, if the network's RoPE depends on them. `fused` has the network's
        weights if native kernels run it. `reduce` sums over the ranks, each with a part of the weights; only rank 0
        samples, and the caller of `launch` marks the layers in the pool.
        The network and the pool are on `device`, by default the CPU. Decode steps of up to `graph_rows` sequences are
        replayed from graphs once these are captured; the pool then has `num_spare_blocks` more than `info.layout`, for
        padding rows. `step_s` is the time limit of a step. `nucleus` finds the tokens of top_p, by default with torch.
        """
        device = device or CpuDevice()
        self._network = network
        self._info = info
        self._memory = memory
        self._store = BlockStore(memory, move_library.load) if device.traits.pools_on_host else DeviceBlockStore(memory)
        self._keeps_logits = keeps_logits
        self._rope = rope
        self._opened, self._device = device, device.torch_device
        self._is_active, self._settle_s = False, queued_s(step_s)
        self._last_choice: torch.Tensor | None = None  # [num_samples] int64: samples of the last step launched
        self._pools = _layer_pools(memory)
        self._attention = PagedAttention(self._pools, backend)
        self._reduce = reduce
        self._written: Callable[[], None] | None = None if reduce else getattr(memory, "written", None)
        attach(network, self._attention)
        self.graphs = None if graph_rows == 0 else self._make_graphs(graph_rows, device, backend)
        """Replays of decode steps, None where all steps are launched op by op."""
        self._fused = None if fused is None else FusedDecoder(fused, self._pools, backend, reduce=reduce)
        self._head = RowHead(network)
        self._nucleus = nucleus
        self._chooser = TorchChooser(nucleus) if self._fused is None else self._fused.chooser

    @property
    def info(self) -> EngineInfo:
        """Properties of the loaded model and its pool."""
        return self._info

    @property
    def runs_ahead(self) -> bool:
        """Whether the device computes asynchronously."""
        return self._opened.traits.is_asynchronous

    @property
    def memory(self) -> Memory:
        """The pool."""
        return self._memory

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The pools of all ranks; here there is one."""
        return (self._memory,)

    def capture_graphs(self, ranks: ShapeOwner | None = None) -> None:
        """Capture the graphs of decode steps, if there are any, on all `ranks`. Called before the first step."""
        if self.graphs is not None:
            self.graphs.capture_all(ranks)

    def close(self) -> None:
        """Free the pool and the copies of its blocks; no step may follow. Idempotent.

        They are freed at once, even while references to the model remain.
        """
        if self.graphs is not None:
            self.graphs.reset()
        self._attention.close()
        self._store.close()
        if self._fused is not None:
            self._fused.close()
        self._pools = []
        self._memory.close()

    def can_replay(self, batch: StepBatch) -> bool:
        """Return whether a step that reports no layers can be replayed from a graph."""
        return self.graphs is not None and _is_graphable(batch) and self.graphs.fits(batch)

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        """Compute one step. `layer_done(layer)` is called when each layer's KV is written, before its attention.

        Where the model runs ahead, the step is only launched; an event of the pool shows when a layer's KV is written.
        """
        if self._fused is not None and not batch.pooling_rows:
            return self._compute(batch, layer_done)
        with torch.inference_mode():  # not in the fused path: entering it costs more than a decode step's embedding
            return self._launch(batch, layer_done) if self.runs_ahead else self._compute(batch, layer_done)

    def _compute(self, batch: StepBatch, layer_done: Callable[[int], None] | None) -> DoneStep:
        logits, pooled = self._run(batch, layer_done)
        made = make_output(logits, batch, self._scored_logits(batch), [one.tolist() for one in pooled], self._chooser)
        return DoneStep(made)

    def _launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None) -> DeviceStep:
        if not self._is_active:
            self._opened.activate()  # for the thread that runs the steps, and its events
            self._is_active = True
        try:
            logits, pooled = self._run(batch, layer_done)
            step = DeviceStep(logits, batch, self._scored_logits(batch), pooled, self._opened, self._nucleus)
        except InstanceLost:  # a wait for a lost rank may have no end, and the instance ends
            raise
        except BaseException as error:
            self._wait_for_launched(error)
            raise
        self._last_choice = step.token_ids
        return step

    def _wait_for_launched(self, error: BaseException) -> None:
        """Wait for the launched work of a failed step: it may write blocks that are about to be freed.

        Raises InternalError if that exceeds the time limit of the steps in flight; a liveness check then finds out why.
        """
        done = self._opened.event()
        done.record()
        if not wait_until(lambda: done.is_done, self._settle_s):
            raise InternalError(
                f"work launched by a failed step has not ended on {self._opened.name} within "
                f"{self._settle_s:g} s ({in_a_line(error)})"
            ) from error

    def _run(
        self, batch: StepBatch, layer_done: Callable[[int], None] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits of the sampled rows, and the hidden states of `batch.pooling_rows`."""
        if batch.scores or batch.pooling_rows:
            with self._head.keeping():
                logits = self._logits(batch, layer_done)
        else:
            logits = self._logits(batch, layer_done)
        return logits, [self._pooled(rows) for rows in batch.pooling_rows]

    @torch.inference_mode()
    def logits(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> torch.Tensor:
        """Compute a step; return the logits of its sampled rows, [num_samples, vocab_size], valid until the next."""
        return self._logits(batch, layer_done)

    def _logits(self, batch: StepBatch, layer_done: Callable[[int], None] | None) -> torch.Tensor:
        metadata = build(batch, block_size=self._memory.layout.block_size, device=self._device)
        if batch.carried:
            self._use_carried_tokens(batch.carried, metadata)
        if self._fused is not None:
            logits = self._fused.run(metadata, layer_done)
            return logits.clone() if batch.scores else logits
        if self.graphs is not None and layer_done is None and _is_graphable(batch) and metadata.grid is None:
            replayed = self.graphs.run(metadata)
            if replayed is not None:
                return replayed
        with self._attention_of_step(metadata, layer_done):
            return self._forward(metadata)

    def _use_carried_tokens(self, carried: Sequence[tuple[int, int]], metadata: StepMetadata) -> None:
        """Put tokens that the previous step has sampled into the step's inputs, on the device.

        Rank 0 sampled them; the other ranks add zeros to them.
        """
        rows, samples = upload(torch.tensor(carried, dtype=torch.int64).T.contiguous(), self._device)
        if self._last_choice is None:
            assert self._reduce is not None, "carried tokens are sampled by an earlier step"
            token_ids = torch.zeros_like(samples)
        else:
            token_ids = self._last_choice.index_select(0, samples)
        if self._reduce is not None:
            token_ids = token_ids.to(torch.int32)  # which every process group can sum
            self._reduce(token_ids)
        metadata.carry(rows, token_ids)

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every tensor. It is done on return: the source may then be freed and written."""
        size = self._memory.layout.block_size
        for pool in self._pools:
            for tensor in (pool.keys, pool.values):
                tensor[target * size : (target + 1) * size] = tensor[source * size : (source + 1) * size]
        copied = self._opened.event()
        copied.record()
        copied.synchronize()

    def _pooled(self, rows: PoolingRows) -> torch.Tensor:
        """Return float64: [hidden_size], or with `each` [count * hidden_size]."""
        states = self._states(rows).double()
        return states.flatten() if rows.each else states.sum(0)

    def _states(self, rows: PoolingRows) -> torch.Tensor:
        """Return the last hidden states of rows of the last step, after the final norm: [count, hidden_size]."""
        chosen = slice(rows.row, rows.row + rows.count)
        if self._fused is None:
            return self._head.states[chosen]
        normed: torch.Tensor = self._network.model.norm(self._fused.rows[chosen].to(getattr(torch, self._info.dtype)))
        return normed

    def _scored_logits(self, batch: StepBatch) -> Iterable[torch.Tensor]:
        """Return slices of the logits of the batch's score rows, computed when they are read."""
        if not batch.scores:
            return ()
        rows = array("q", [score.row for score in batch.scores])
        if self._fused is not None:
            size = rows_at_once(self._info.vocab_size)
            return map(self._fused.logits, (rows[start : start + size] for start in range(0, len(rows), size)))
        return self._head.slices(upload_ints(rows, self._device), self._info.vocab_size)

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks out of the pool."""
        self._store.save(block_ids, slots)

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy them back."""
        self._store.load(slots, block_ids)

    def _forward(self, metadata: StepMetadata) -> torch.Tensor:
        inputs: dict[str, Any] = {"position_ids": metadata.positions}
        if metadata.embedded:
            inputs["inputs_embeds"] = self._embeddings(metadata)
        else:
            inputs["input_ids"] = metadata.token_ids
        if self._keeps_logits:
            inputs["logits_to_keep"] = metadata.sample_rows
        logits: torch.Tensor = self._network(**inputs, use_cache=False).logits[0]
        return logits if self._keeps_logits else logits[metadata.sample_rows]

    def _embeddings(self, metadata: StepMetadata) -> torch.Tensor:
        """Return the embeddings of the tokens, and those of images in their rows: [1, num_tokens, hidden_size]."""
        embeddings: torch.Tensor = self._network.get_input_embeddings()(metadata.token_ids)
        metadata.embed(embeddings[0], embeddings.dtype)
        return embeddings

    def _make_graphs(self, most_rows: int, device: Device, backend: AttentionBackend) -> DecodeGraphs:
        layout = self._info.layout
        return DecodeGraphs(
            device, backend, self._decode, block_size=layout.block_size, spare_block=layout.num_blocks,
            max_rows=most_rows, max_blocks=layout.num_blocks_for(self._info.max_model_len), reduce=self._reduce,
        )  # fmt: skip

    def _decode(self, inputs: DecodeInputs, attention: StepAttention) -> torch.Tensor:
        """Run the network over fixed inputs; return the logits of every row, [num_rows, vocab_size]."""
        self._attention.begin_fixed(attention)
        try:
            made: torch.Tensor = self._network(
                input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False
            ).logits[0]
        finally:
            self._attention.end()
        return made

    @contextmanager
    def _attention_of_step(self, metadata: StepMetadata, layer_done: Callable[[int], None] | None) -> Iterator[None]:
        if self._rope is not None:
            self._rope.begin(metadata.sequences, self._device)
        self._attention.begin(metadata, self._mark_layers(layer_done))
        try:
            yield
        finally:
            self._attention.end()

    def _mark_layers(self, layer_done: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Record an event in a device's pool before each layer is reported, so that readers can wait for its KV."""
        written = self._written
        if layer_done is None or written is None:
            return layer_done

        def mark(layer: int) -> None:
            written()
            layer_done(layer)

        return mark


def _is_graphable(batch: StepBatch) -> bool:
    """Return whether the step reads token ids and positions, and makes logits of sampled rows alone."""
    return not (batch.scores or batch.pooling_rows or batch.embedded)


def _layer_pools(memory: Memory) -> list[LayerPool]:
    """Return each layer's key and value tensors as views of the pool's bytes; touches no page."""
    layout = memory.layout
    pools = []
    for layer in range(layout.num_layers):
        keys, values = (_pool_tensor(memory, index) for index in layout.tensors_of(layer))
        pools.append(LayerPool(keys, values))
    return pools


def _pool_tensor(memory: Memory, index: int) -> torch.Tensor:
    layout, spec = memory.layout, memory.layout.tensors[index]
    shape = (layout.num_blocks * layout.block_size, spec.heads, spec.head_dim)
    count = shape[0] * shape[1] * shape[2]
    dtype = getattr(torch, spec.dtype)
    start, tensor = layout.offsets[index], getattr(memory, "tensor", None)
    if tensor is None:  # torch.frombuffer would not keep the memory: a step after `close` would crash
        tensor = torch.from_numpy(np.frombuffer(memory.buffer, np.uint8))
    pool: torch.Tensor = tensor
    return pool[start : start + count * dtype.itemsize].view(dtype).view(shape)
