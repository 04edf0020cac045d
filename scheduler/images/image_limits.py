"""Limits on the bytes of images, of one request and of all running ones, and the parser of --limit-mm-per-prompt."""

import json
import threading

from wire.errors import ConfigError, InvalidRequest, Overloaded
from wire.prompt_images import MAX_IMAGE_BYTES


def parse_image_limit(text: str) -> int:
    """Return the number in `4`, or, as vLLM writes it, `image=4` or `{"image": 4, "video": 0}`. Raises ConfigError."""
    if text.isdecimal():
        return int(text)
    try:
        given = json.loads(text) if text.lstrip().startswith("{") else dict([text.split("=")])
        numbers = {name: int(number) for name, number in given.items()}
    except (TypeError, ValueError):
        numbers = {}
    number = numbers.pop("image", -1)
    if any(numbers.values()):
        raise ConfigError(f"{text[:80]!r}: only images are served")
    if number < 0:
        raise ConfigError(f'{text[:80]!r} is not image=4 or {{"image": 4}}, with a number of 0 or more')
    return number


class ImageBudget:
    """Owner of the count of image bytes that all requests hold. Local files are read, and counted, on threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Count further bytes. Raises Overloaded if there are too many. The caller holds the lock."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"the images of running requests have {self.num_bytes} bytes, and {num_bytes} more would exceed the "
                f"limit of {self._max_bytes} (--max-image-bytes)"
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Subtract these bytes. The caller holds the lock."""
        self.num_bytes -= num_bytes


class HeldImageBytes:
    """The image bytes that one request holds until `release`."""

    def __init__(self, budget: ImageBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count further bytes. Raises InvalidRequest if this request has too many, Overloaded if all together have."""
        with self._budget.lock:
            if self._num_bytes + num_bytes > MAX_IMAGE_BYTES:
                raise InvalidRequest(f"the images of a request may have at most {MAX_IMAGE_BYTES} bytes together")
            self._budget.take(num_bytes)
            self._num_bytes += num_bytes

    def release(self) -> None:
        """Return all bytes to the budget. Idempotent."""
        with self._budget.lock:
            self._budget.give_back(self._num_bytes)
            self._num_bytes = 0
