"""One instance: engine loop, KV sender and receiver, both workers, and the sessions that send them commands.

sessions --commands--> workers --post--> engine loop --results--> workers --events--> the prompt's session
                          |  put, commit            ^ admit
                          v                         |
                       sender ==link to a peer==> receiver
"""

import asyncio
import functools
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.interface import Chunk, Engine, StepResult
from engine.kv.pool_prefault import PoolTouch
from engine.vision.image_encoder import ImageEncoder
from instance.config import InstanceConfig
from instance.engine_loop import EngineLoop
from instance.links import CountedReceiver, LinkedSender, LinkMeasurer, add_links
from instance.offered_transports import describe_transports
from instance.session import InstanceSession
from instance.sessions import Sessions
from instance.workers import Workers
from native.ticker import run_time, starved_s
from telemetry.logs import EventLogger
from wire.description import InstanceDescription
from wire.errors import Draining
from wire.held_role import HeldRole
from wire.load import LoadSnapshot
from wire.messages import MeasureLink, OpenSession, SessionOpen, SetRole, TableRead
from wire.shared_limits import MAX_ORPHAN_S
from wire.types import PROTOCOL_VERSION, Role

if TYPE_CHECKING:
    from engine.grammar.store import GrammarStore

_log = EventLogger("instance")

HEARTBEAT_S = 1.0
UNHEALTHY_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this process: a readable id, and an epoch that no other process ever had."""

    instance_id: str
    epoch: int

    @classmethod
    def new(cls, config: InstanceConfig, port: int) -> "Identity":
        """Name a new process after its address and role."""
        return cls(f"{config.role}-{config.server_ip}:{port}", secrets.randbits(63))


class InstanceHost:
    """Composes one instance and serves its sessions (InstanceService). Its methods run on the event loop's thread."""

    def __init__(
        self, config: InstanceConfig, engine: Engine, identity: Identity, port: int, clock: Callable[[], float],
        grammars: "GrammarStore | None" = None, images: ImageEncoder | None = None,
    ):  # fmt: skip
        self.config, self.engine, self.identity = config, engine, identity
        self._port, self._grammars, self._images = port, grammars, images
        self.table_digest = config.table_digest
        self._role = HeldRole(config.role)
        self._draining: str | None = None
        self.loop = EngineLoop(
            engine, clock=functools.partial(run_time, clock), on_layer=self._on_layer, on_step=self._on_step,
            chunk_tokens=config.prefill_chunk_size(engine.info.device),
        )  # fmt: skip
        embed = None if images is None else images.prepare
        self._sessions = Sessions(identity.instance_id, lambda: self.load())
        self.workers = Workers(engine, self.loop.post, self.load, clock, embed, self._sessions.share_load)
        self._sender: LinkedSender | None = None
        self._receiver: CountedReceiver | None = None
        self._measurer = LinkMeasurer()
        self._watch: asyncio.Task[None] | None = None
        self._touches = [PoolTouch(memory) for memory in engine.memories]

    def start(self, sender: LinkedSender, receiver: CountedReceiver) -> None:
        """Bind the sender and receiver, start the engine thread and the heartbeats. Needs a running event loop."""
        self._sender, self._receiver = sender, receiver
        self.workers.prefill.use(sender)
        self.workers.decode.use(receiver)
        self.loop.start()
        for touch in self._touches:
            touch.start()
        self._watch = asyncio.get_running_loop().create_task(self._send_heartbeats())

    async def stop(self) -> None:
        """End all work, then the threads, and release the pool."""
        if self._watch is not None:
            self._watch.cancel()
        self._sessions.end_all()
        assert self._sender is not None
        assert self._receiver is not None
        for touch in self._touches:
            await asyncio.to_thread(touch.stop)
        await asyncio.to_thread(self._sender.close)
        await asyncio.to_thread(self._receiver.close)
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)
        if self._images is not None:
            await asyncio.to_thread(self._images.close)
        if await asyncio.to_thread(self.loop.stop, self.config.drain_s):
            self.engine.close()
        else:
            _log.warning("engine_still_stepping", waited_s=self.config.drain_s)

    def healthy(self) -> bool:
        """Return whether the engine thread runs and makes progress at about its recent pace."""
        return self.loop.alive() and not self.loop.is_stuck(UNHEALTHY_AFTER_S)

    @property
    def in_session(self) -> bool:
        """Whether a scheduler has an open session here."""
        return self._sessions.any_open

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is on this instance, or KV blocks are reserved for one."""
        load = self.load()
        return bool(load.running or load.waiting or load.held_prompts or load.blocks_used > load.blocks_probe)

    def use_table(self, digest: str) -> None:
        """Adopt the global table with this digest, and report it to the schedulers."""
        if digest != self.table_digest:
            self.table_digest = digest
            self._sessions.emit(TableRead(digest))

    def drain(self, why: str | None) -> None:
        """Refuse every new prompt and session, with `why` as the message; None accepts them again."""
        self._draining = why

    def describe(self) -> InstanceDescription:
        """Return the description of this instance."""
        info, options = self.engine.info, self.config.options
        assert self._receiver is not None
        return InstanceDescription(
            instance_id=self.identity.instance_id,
            epoch=self.identity.epoch,
            server_ip=self.config.server_ip,
            device_ids=self.config.device_ids,
            host=options.host,
            port=self._port,
            pid=os.getpid(),
            role=self.config.role,
            table_digest=self.table_digest,
            protocol_version=PROTOCOL_VERSION,
            model=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            block_size=info.layout.block_size,
            num_blocks=info.layout.num_blocks,
            kv_tensors=info.layout.tensors,
            prefill_chunk_size=self.config.prefill_chunk_size(info.device),
            max_num_seqs=options.max_num_seqs,
            endpoints=self._receiver.endpoints,
            device=info.device,
            reuse_decoded=options.reuse_decoded,
            kv_digests=options.kv_digests,
            kv_transports=describe_transports(options.kv_transport, self.engine.memories[0]),
        )

    def open(self, hello: OpenSession) -> InstanceSession:
        """Open a session; an older one of the same scheduler is ended.

        Raises Incompatible for an older epoch or one scheduler too many, and Draining while new prompts are refused.
        """
        if self._draining is not None:
            raise Draining(self._draining)
        self._sessions.make_room(hello)
        session = InstanceSession(
            hello, self.workers, self._session_over, self._measure, self._grammars, lambda: self._draining,
            None if self._images is None else self._images.prepare, self._set_role,
        )  # fmt: skip
        session.emit(SessionOpen(self.identity.instance_id, self.identity.epoch, self.load()))
        session.emit(self._role.held)
        session.emit(TableRead(self.table_digest))  # the table may have changed since describe()
        self._sessions.add(session)  # only now: events of other threads follow the three above
        _log.info("session_open", scheduler=hello.scheduler_id, epoch=hello.epoch)
        return session

    def load(self) -> LoadSnapshot:
        """Return the current load. Any thread."""
        load = self.engine.load()
        self.loop.add_to(load)
        load.starved_s = starved_s()
        if self._images is not None:
            self._images.add_to(load)
        if self._sender is not None and self._receiver is not None:
            add_links(load, self._sender, self._receiver)
        return load

    def _on_layer(self, layer: int, chunks: Sequence[Chunk]) -> None:
        self.workers.prefill.on_layer(layer, chunks)

    def _on_step(self, result: StepResult) -> None:
        self.workers.on_step(result)

    def _measure(self, session: InstanceSession, command: MeasureLink) -> None:
        assert self._sender is not None
        self._measurer.measure(self._sender, command, session)

    def _set_role(self, session: InstanceSession, command: SetRole) -> None:
        """Answer the session that sent the command, and report a change of role to the others."""
        obstacle = ""
        if command.role is not Role.DECODE and self.engine.info.takes_images and self._images is None:
            obstacle = "it started as a decode instance, without the image encoder that this model needs in other roles"
        before, answer = self._role.held, self._role.take(command, obstacle)
        _log.info("role_held", role=answer.role, epoch=answer.epoch, error=answer.error)
        session.emit(answer)
        if self._role.held != before:
            self._sessions.emit(self._role.held, but=session)

    def _session_over(self, session: InstanceSession) -> None:
        _log.info("session_over", scheduler=session.hello.scheduler_id, silent_s=session.silent_for())
        self._sessions.remove(session)
        orphan_s = min(session.hello.orphan_s, MAX_ORPHAN_S)
        if self.workers.cancel_all(session, "the scheduler's session has ended", keep_streams=orphan_s > 0):
            why = f"no scheduler has adopted it within {orphan_s:g} s"
            asyncio.get_running_loop().call_later(orphan_s, self.workers.cancel_all, session, why)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._sessions.beat()
