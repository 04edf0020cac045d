"""From a conversation's images as sent to their files, sizes and digests, within the limits of a request."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from images.checkpoint import VisionCheckpoint
from images.digest import image_digest
from scheduler.images.header_reader import HeaderReader
from scheduler.images.image_limits import HeldImageBytes, ImageBudget
from scheduler.images.image_part import ImagePart, LoadedImage, Message, images_in, with_images
from scheduler.images.image_source import ImageSources
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unavailable

_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class ImageLoader:
    """Loads the images of all requests to a model."""

    model: str
    vision: VisionCheckpoint
    max_images: int
    sources: ImageSources
    budget: ImageBudget
    headers: HeaderReader

    async def load(self, messages: Sequence[Message], held: HeldImageBytes, salt: str) -> Sequence[Message]:
        """Return the conversation with LoadedImages; `held` counts their bytes, `salt` limits sharing to a tenant.

        Raises InvalidRequest that names the part, Overloaded, and Unavailable if no process can read headers.
        """
        parts: list[ImagePart] = list(images_in(messages))
        if len(parts) > self.max_images:
            path = parts[self.max_images].path
            raise InvalidRequest(
                f"{path}: a chat has {len(parts)} images, at most {self.max_images} are allowed "
                "(--limit-mm-per-prompt)",
                path,
            )
        few = asyncio.Semaphore(_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as tasks:
                loads = [tasks.create_task(self._load(part, held, salt, few)) for part in parts]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return with_images(messages, [load.result() for load in loads])

    async def _load(self, part: ImagePart, held: HeldImageBytes, salt: str, few: asyncio.Semaphore) -> LoadedImage:
        async with few:
            try:
                data = await self._read(part, held)
                header = await self.headers.read(data)
                tokens = self.vision.family.tokens(header.width, header.height)
            except InvalidRequest as error:
                raise InvalidRequest(f"{part.path}: {error}", part.path) from None
        digest = await asyncio.to_thread(
            image_digest, data, settings_digest=self.vision.settings_digest, model=self.model, cache_salt=salt
        )
        return LoadedImage(data, tokens.count, tokens.grid, digest, part.path)

    async def _read(self, part: ImagePart, held: HeldImageBytes) -> bytes:
        """Return the file; that a server fails is the request's fault here."""
        try:
            return await self.sources.read(part.url, held.take)
        except (ConfigError, Unavailable, DeadlineExceeded) as error:
            raise InvalidRequest(str(error)) from None

    async def close(self) -> None:
        """Kill the process that reads headers."""
        await self.headers.close()
