"""Serve one prompt on one rank: read or compute its KV, generate, and hold its blocks for a decode worker."""

from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from engine.finish import finish_at
from testing.vllm_worker.answer_body import FakeChoice
from testing.vllm_worker.continuation import FakeContinuation, KvEntry
from testing.vllm_worker.hybrid import num_prefilled, num_recomputed
from testing.vllm_worker.layerwise import SUFFIX, receive_kv, send_kv
from testing.vllm_worker.push import LoadFailed, offer_kv, wait_for_kv
from testing.vllm_worker.rank import WorkerRank
from testing.vllm_worker.request import FakeBody
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.side_channel import RemoteBlocks
from wire.types import FinishReason


@dataclass(slots=True)
class FakeGeneration:
    """One prompt of a request. At the end, `transfer` and `cached_tokens` go into the worker's answer."""

    settings: WorkerSettings
    rank: WorkerRank
    session: aiohttp.ClientSession
    request_id: str
    body: FakeBody
    prompt: tuple[int, ...]
    transfer: dict[str, Any] | None = None
    cached_tokens: int = 0

    async def pieces(self) -> AsyncGenerator[list[FakeChoice], None]:
        """Yield what each step has added to the live sequences. Raises LoadFailed. Closing it aborts the prompt."""
        params, fake = self.body.params, self.settings.fake
        if self.body.marks:  # vLLM's front end decodes images before its engine knows the request
            await self.rank.pause(self.settings.image_seconds)
        if self.body.leg == "prefill" and self.settings.connector != "none":
            self.prompt = self.prompt[: num_prefilled(self.settings, self.body, len(self.prompt))]
        room = len(self.prompt) + params.max_tokens * params.n
        is_remote = self.body.leg == "decode" and self.settings.connector == "nixl"
        remote = RemoteBlocks(self.session, self.body.transfer, self.rank.peers) if is_remote else None
        try:
            async with self.rank.run(room) as block_ids:
                kv = await self._kv(remote, block_ids)
                remote = None
                self.rank.write(block_ids, kv)
                if self.settings.connector == "ascend-layerwise" and self.body.leg == "prefill":
                    await send_kv(self.session, self.body.transfer, self.request_id[:-SUFFIX], kv)
                first = FakeContinuation(fake, self.prompt, kv)
                live = {index: first.fork() for index in range(params.n)}
                for position in range(params.max_tokens):
                    if position > 0:
                        await self.rank.pause(fake.step_seconds + fake.token_seconds * len(live))
                    step = [self._piece(one, index, position) for index, one in live.items()]
                    live = {one.index: live[one.index] for one in step if one.finish_reason is None}
                    if not live and self.body.leg == "prefill":
                        await self._hand_off(block_ids, kv)
                    yield step
                    if not live:
                        break
        finally:
            if remote is not None:  # aborted before its KV was read: free it on the prefill worker
                with suppress(LoadFailed):
                    await remote.end()

    async def _kv(self, remote: RemoteBlocks | None, block_ids: list[int]) -> list[KvEntry]:
        settings, transfer = self.settings, self.body.transfer
        url = transfer.get("metaserver")
        if remote is not None:
            return self._with_recomputed(await self._read(remote))
        if url is not None and settings.connector == "ascend-layerwise":
            kv = await receive_kv(settings, self.rank, self.session, url, self.request_id, block_ids)
        elif self.body.leg == "decode" and settings.connector in ("nixl-push", "mooncake"):
            kv = await wait_for_kv(settings, self.rank, self.session, transfer, self.request_id, block_ids)
        else:
            kv = await self._compute()
            if self.body.leg != "decode":
                cached = self.rank.note_prompt(self.prompt, f"{self.body.cache_salt} {self.body.marks}")
                self.cached_tokens = 0 if self.body.params.prompt_logprobs is not None else cached
            return kv
        self.cached_tokens = len(self.prompt) - num_recomputed(settings, len(self.prompt))
        return self._with_recomputed(kv)

    def _with_recomputed(self, kv: list[KvEntry]) -> list[KvEntry]:
        count = num_recomputed(self.settings, len(self.prompt))
        return [*kv, *((token_id, self.settings.fake.salt) for token_id in self.prompt[len(self.prompt) - count :])]

    async def _read(self, remote: RemoteBlocks) -> list[KvEntry]:
        try:
            kv = await remote.read(None if self.settings.is_hybrid else len(self.prompt))
        except LoadFailed:
            self.rank.counts.failed_transfers += 1
            raise
        fetched = len(self.prompt) - num_recomputed(self.settings, len(self.prompt))
        self.rank.counts.transferred_tokens += fetched
        self.cached_tokens = self.body.transfer.get("remote_prefill_cached_tokens", fetched)
        return kv

    async def _compute(self) -> list[KvEntry]:
        fake = self.settings.fake
        await self.rank.pause(fake.step_seconds + fake.token_seconds * len(self.prompt))
        self.rank.counts.computed_tokens += len(self.prompt)
        marks = self.body.marks
        return [(token_id, fake.salt + marks.get(at, 0)) for at, token_id in enumerate(self.prompt)]

    def _piece(self, sequence: FakeContinuation, index: int, position: int) -> FakeChoice:
        params = self.body.params
        piece = FakeChoice(index, prompt=self.prompt if position == 0 else None)
        if position == 0 and params.prompt_logprobs is not None:
            piece.prompt_logprobs = sequence.prompt_logprobs(params.prompt_logprobs)
        token_id, scores = sequence.next_token(params, index, position)
        piece.token_ids.append(token_id)
        piece.logprobs.append(scores)
        finish = finish_at(
            sequence.token_ids,
            position + 1,
            params,
            prompt_length=len(self.prompt),
            max_model_len=self.settings.fake.max_model_len,
        )
        if finish is not None:
            reason, stop = finish
            piece.finish_reason = "stop" if reason is FinishReason.STOP else "length"
            piece.stop_reason = None if stop in self.settings.fake.eos_token_ids else stop
        self.rank.counts.generation_tokens += 1
        return piece

    async def _hand_off(self, block_ids: list[int], kv: list[KvEntry]) -> None:
        """Hold the KV; a push connector sends it once the decode worker has registered."""
        connector, transfer = self.settings.connector, self.body.transfer
        is_known = transfer.get("transfer_id") if connector == "mooncake" else connector.startswith("nixl")
        if not is_known:
            return
        held = self.rank.hold(self.request_id, block_ids, len(self.prompt), self.settings.lease_s)
        if connector != "mooncake":
            self.transfer = self._reference(held)
        if connector != "nixl":
            await offer_kv(self.rank, self.session, transfer, self.request_id, kv)

    def _reference(self, held: list[int]) -> dict[str, Any]:
        is_pull = self.settings.connector == "nixl"
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block_id + self.settings.block_offset for block_id in held]],
            "remote_engine_id": self.rank.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.settings.host,
            "remote_port": self.rank.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(self.prompt),
            **({"remote_blocks_expiry_time": None} if is_pull else {}),
            **({"transfer_mode": "pull" if is_pull else "push"} if self.settings.version >= "0.32" else {}),
            "remote_prefill_cached_tokens": 0,
        }
