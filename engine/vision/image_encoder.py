"""The instance's image encoder: each image is encoded once, in the child, however many prompts have it.

prepare --> every image cached, or sent as embeddings: a done future
        --> else the prompt waits for its images: each one queued once --> thread: child encodes --> cache --> future
A prompt that cancels its future waits no more; an image that nobody waits for is not encoded.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from engine.interface import Embeddings
from engine.vision.encoded_image import EncodedImage, EncoderLimits
from engine.vision.sent_embeddings import convert_embeddings
from images.byte_cache import ByteCache
from images.token_count import ImageTokens
from telemetry.logs import EventLogger
from wire.errors import Draining, InternalError, InvalidRequest, Overloaded, PdserveError, Unavailable
from wire.load import LoadSnapshot
from wire.types import PromptImage

_log = EventLogger("images")
_CLOSE_WAIT_S = 30.0


class Encoding(Protocol):
    """What encodes files, one at a time on one thread: a child process, or a fake."""

    tower_bytes: int

    def start(self) -> None:
        """Load the tower. Raises PdserveError."""
        ...

    def encode(self, data: bytes) -> EncodedImage:
        """Return the embeddings of a file. Raises PdserveError."""
        ...

    def close(self) -> None:
        """End. Idempotent."""
        ...


@dataclass(slots=True)
class _Waiting:
    """A prompt and those of its embeddings that are ready, by digest."""

    images: tuple[PromptImage, ...]
    future: "Future[tuple[Embeddings, ...]]" = field(default_factory=Future)
    found: dict[bytes, EncodedImage] = field(default_factory=dict)


class ImageEncoder:
    """Encodes the images of prompts on its own thread. `prepare` may be called from any thread."""

    def __init__(self, child: Encoding, limits: EncoderLimits, dtype: str = "float32") -> None:
        """`dtype` is the engine's; embeddings that were sent are converted to it."""
        self._child, self._limits, self._dtype = child, limits, dtype
        self._lock = threading.Lock()
        self._cache = ByteCache[bytes, EncodedImage](limits.cache_bytes, lambda encoded: len(encoded.values))
        self._waiting: defaultdict[bytes, list[_Waiting]] = defaultdict(list)
        self._queue: queue.Queue[PromptImage | None] = queue.Queue()
        self._closed = False
        self._started: Future[None] = Future()
        self.num_encoded = self._num_sought = self._num_found = 0
        self._thread = threading.Thread(target=self._run, name="image-encoder", daemon=True)

    def start(self) -> int:
        """Start the thread and wait until the tower is loaded; return its size in bytes. Raises PdserveError."""
        self._thread.start()
        try:
            self._started.result(self._limits.start_s)
        except TimeoutError as error:
            raise Unavailable(f"the vision tower was not loaded within {self._limits.start_s:g} s") from error
        return self._child.tower_bytes

    def prepare(self, images: Sequence[PromptImage]) -> "Future[tuple[Embeddings, ...]]":
        """Return the future of the images' embeddings, in their order; cancel it if the prompt is gone.

        Its error is InvalidRequest for an image that cannot be encoded, Overloaded where too many wait, Draining
        after `close`, or an error of the child.
        """
        prompt = _Waiting(tuple(images))
        for image in prompt.images:
            if image.dtype:
                try:
                    values = convert_embeddings(image, self._dtype)
                except InvalidRequest as refusal:
                    prompt.future.set_exception(_of_image(prompt, image, refusal))
                    return prompt.future
                prompt.found[image.digest] = EncodedImage(ImageTokens(image.count, image.grid), values)
        with self._lock:
            missing = self._look_up(prompt)
            error = self._why_not(missing)
            if error is None:
                for digest, image in missing.items():
                    if digest not in self._waiting:
                        self._queue.put(image)
                    self._waiting[digest].append(prompt)
        if error is not None:
            prompt.future.set_exception(error)
        elif not missing:
            _finish(prompt)
        return prompt.future

    def add_to(self, load: LoadSnapshot) -> None:
        """Add the encoder's figures to `load`. Any thread."""
        load.images_waiting = len(self._waiting)
        load.images_sought, load.images_found, load.images_encoded = self._num_sought, self._num_found, self.num_encoded
        load.image_cache_bytes = self._cache.num_bytes

    def close(self) -> None:
        """End the child and the thread; waiting prompts are refused. Idempotent."""
        with self._lock:
            self._closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_WAIT_S)

    def _look_up(self, prompt: _Waiting) -> dict[bytes, PromptImage]:
        """Add what is cached to the prompt, and return the other images. The lock is held."""
        missing = dict[bytes, PromptImage]()
        for image in prompt.images:
            if image.dtype:
                continue
            self._num_sought += 1
            encoded = self._cache.find(image.digest)
            if encoded is None:
                missing[image.digest] = image
            else:
                self._num_found += 1
                prompt.found[image.digest] = encoded
        return missing

    def _why_not(self, missing: dict[bytes, PromptImage]) -> PdserveError | None:
        if self._closed:
            return Draining("this instance is shutting down")
        if missing and len(self._waiting) >= self._limits.queue_length:
            return Overloaded(f"the number of images that wait to be encoded is {len(self._waiting)}, the limit")
        if any(not image.data for image in missing.values()):
            return InvalidRequest(
                "an image is not cached on this instance any more, and its file was not sent", "images"
            )
        return None

    def _run(self) -> None:
        """Run the encoder thread. The child dies with this thread, so it runs until the encoder is closed."""
        try:
            if self._try(self._child.start, self._started):
                while (image := self._queue.get()) is not None and not self._closed:
                    self._serve(image)
        finally:
            self._child.close()
            self._refuse_all()

    def _try(self, action: Callable[[], None], outcome: "Future[None]") -> bool:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - passed to the thread that waits for it
            outcome.set_exception(error)
            return False
        outcome.set_result(None)
        return True

    def _serve(self, image: PromptImage) -> None:
        with self._lock:
            if all(prompt.future.cancelled() for prompt in self._waiting[image.digest]):
                del self._waiting[image.digest]
                return
        encoded = self._encode(image)
        with self._lock:
            if isinstance(encoded, EncodedImage):
                self.num_encoded += 1
                self._cache.keep(image.digest, encoded)
            prompts = self._waiting.pop(image.digest)
        for prompt in prompts:
            if isinstance(encoded, EncodedImage):
                prompt.found[image.digest] = encoded
                _finish(prompt)
            else:
                _fail(prompt, _of_image(prompt, image, encoded))

    def _encode(self, image: PromptImage) -> EncodedImage | PdserveError:
        try:
            return self._child.encode(image.data)
        except PdserveError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the outermost frame of an image: answered and logged
            _log.error("image_failed", error, error=error)
            return InternalError(f"encoding the image failed: {error}")

    def _refuse_all(self) -> None:
        with self._lock:
            self._closed = True
            prompts = [prompt for waiting in self._waiting.values() for prompt in waiting]
            self._waiting.clear()
        for prompt in prompts:
            _fail(prompt, Draining("this instance is shutting down"))


def _finish(prompt: _Waiting) -> None:
    """Resolve the future once every image is encoded and has the tokens that the prompt reserves for it."""
    if prompt.found.keys() < {image.digest for image in prompt.images}:
        return
    for index, image in enumerate(prompt.images):
        tokens = prompt.found[image.digest].tokens
        if (tokens.count, tokens.grid) != (image.count, image.grid):
            has = f"image {index} has {tokens.count} tokens in a grid of {tokens.grid}"
            expected = f"reserves {image.count} in a grid of {image.grid}"
            _fail(prompt, InvalidRequest(f"{has}, but the prompt {expected}", f"images.{index}"))
            return
    if prompt.future.set_running_or_notify_cancel():
        prompt.future.set_result(tuple(prompt.found[image.digest].values for image in prompt.images))


def _of_image(prompt: _Waiting, image: PromptImage, error: PdserveError) -> PdserveError:
    """Return the error with the index of the image where the image is at fault."""
    if not isinstance(error, InvalidRequest):
        return error
    index = [one.digest for one in prompt.images].index(image.digest)
    return InvalidRequest(f"image {index}: {error}", f"images.{index}")


def _fail(prompt: _Waiting, error: PdserveError) -> None:
    if not prompt.future.done() and prompt.future.set_running_or_notify_cancel():
        prompt.future.set_exception(error)
