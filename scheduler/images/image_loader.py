"""Loads the images of a conversation: their files, sizes and digests, within the limits of a request."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from images.byte_cache import ByteCache
from images.checkpoint import VisionCheckpoint
from images.digest import image_digest
from scheduler.images.header_reader import HeaderReader
from scheduler.images.image_embeds import read_embeds
from scheduler.images.image_limits import HeldImageBytes, ImageBudget
from scheduler.images.image_part import ImagePart, LoadedImage, Message, images_in, with_images
from scheduler.images.image_source import ImageSources
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unavailable

_AT_ONCE = 4
NAMED_BYTES = 128 * 2**20
"""Files of images that later requests may name by their uuid."""


def _named_images() -> ByteCache[tuple[str, str], LoadedImage]:
    return ByteCache(NAMED_BYTES, lambda image: len(image.data))


@dataclass(frozen=True, slots=True)
class ImageLoader:
    """Loads the images of all requests to a model. `named` has those with a uuid, by the salt of their tenant.

    `vision` is None if pdserve's own instances cannot encode the model's images; with `has_workers`, vLLM workers may.
    """

    model: str
    vision: VisionCheckpoint | None
    max_images: int
    sources: ImageSources
    budget: ImageBudget
    headers: HeaderReader
    takes_embeds: bool = False
    has_workers: Callable[[], bool] = lambda: False
    named: ByteCache[tuple[str, str], LoadedImage] = field(default_factory=_named_images)

    async def load(self, messages: Sequence[Message], held: HeldImageBytes, salt: str) -> Sequence[Message]:
        """Return the conversation with LoadedImages; `held` counts their bytes, `salt` limits sharing to a tenant.

        Raises an InvalidRequest that names the part; Overloaded; or Unavailable if no process can read headers.
        """
        parts: list[ImagePart] = list(images_in(messages))
        if len(parts) > self.max_images:
            path = parts[self.max_images].path
            raise InvalidRequest(
                f"{path}: a chat has {len(parts)} images, but the limit is {self.max_images} (--limit-mm-per-prompt)",
                path,
            )
        few = asyncio.Semaphore(_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as tasks:
                loads = {
                    part.path: tasks.create_task(self._load(part, held, salt, few))
                    for part in parts if not part.is_named
                }  # fmt: skip
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        for part in parts:
            if part.uuid and not part.is_named:
                self.named.keep((salt, part.uuid), loads[part.path].result())
        images = [
            self._named(part, held, salt) if part.is_named else loads[part.path].result() for part in parts
        ]  # fmt: skip
        return with_images(messages, images)

    async def _load(self, part: ImagePart, held: HeldImageBytes, salt: str, few: asyncio.Semaphore) -> LoadedImage:
        async with few:
            try:
                if part.embeds is not None:
                    return await self._load_embeds(part, held, salt)
                data = await self._read(part, held)
                header = await self.headers.read(data)
                loaded = LoadedImage(
                    data, 0, (1, 1, 1), b"", part.path, media_type=f"image/{header.format.lower()}", detail=part.detail
                )
                if self.vision is None:
                    return loaded
                tokens = self.vision.family.tokens(header.width, header.height)
            except InvalidRequest as error:
                raise InvalidRequest(f"{part.path}: {error}", part.path) from None
        digest = await self._digest(data, self.vision.settings_digest, salt)
        return replace(loaded, count=tokens.count, grid=tokens.grid, digest=digest)

    async def _load_embeds(self, part: ImagePart, held: HeldImageBytes, salt: str) -> LoadedImage:
        if not self.takes_embeds:
            raise InvalidRequest("image_embeds parts are off: start the scheduler with --enable-mm-embeds")
        if self.vision is None:
            raise InvalidRequest("image_embeds are not available over workers of other engines, which unpickle them")
        sent = read_embeds(part.embeds, self.vision)
        data = await self.sources.decode(sent.data, held.take, "image_embeds.data")
        await asyncio.to_thread(sent.check, data)
        tokens = sent.tokens
        digest = await self._digest(data, f"{sent.dtype} {tokens.grid}".encode(), salt)
        return LoadedImage(data, tokens.count, tokens.grid, digest, part.path, sent.dtype)

    async def _digest(self, data: bytes, settings: bytes, salt: str) -> bytes:
        return await asyncio.to_thread(
            image_digest, data, settings_digest=settings, model=self.model, cache_salt=salt
        )  # fmt: skip

    def _named(self, part: ImagePart, held: HeldImageBytes, salt: str) -> LoadedImage:
        """Return the image that an earlier part with this uuid had."""
        image = self.named.find((salt, part.uuid))
        if image is None:
            known = f"{part.path}: no image with the uuid {part.uuid[:80]!r} is stored: send its URL"
            raise InvalidRequest(known, part.path)
        held.take(len(image.data))
        return replace(image, path=part.path, detail=part.detail)

    async def _read(self, part: ImagePart, held: HeldImageBytes) -> bytes:
        """Return the file; the failure of its server counts as an error of the request."""
        try:
            return await self.sources.read(part.url, held.take)
        except (ConfigError, Unavailable, DeadlineExceeded) as error:
            raise InvalidRequest(str(error)) from None

    async def close(self) -> None:
        """Kill the process that reads headers."""
        await self.headers.close()
