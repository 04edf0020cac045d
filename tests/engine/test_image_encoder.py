"""The image encoder: each image once, its cache, prompts that wait, are cancelled or fail alone."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager

import pytest

from engine.vision.encoded_image import EncoderLimits
from engine.vision.image_encoder import ImageEncoder
from testing.engine.fake_encoding import BROKEN, FakeEncoding
from wire.errors import ConfigError, Draining, InvalidRequest, Overloaded, Unavailable
from wire.load import LoadSnapshot
from wire.types import PromptImage

_WAIT_S = 60.0


@contextmanager
def running(child: FakeEncoding, limits: EncoderLimits | None = None) -> Iterator[ImageEncoder]:
    encoder = ImageEncoder(child, limits or EncoderLimits())
    encoder.start()
    try:
        yield encoder
    finally:
        encoder.close()


def images(*files: bytes, count: int = 2) -> tuple[PromptImage, ...]:
    return tuple(
        PromptImage(10 * index, count, hashlib.sha256(data).digest(), (1, 1, count), data)
        for index, data in enumerate(files)
    )


def load_of(encoder: ImageEncoder) -> LoadSnapshot:
    load = LoadSnapshot()
    encoder.add_to(load)
    return load


def embeddings(encoder: ImageEncoder, wanted: Sequence[PromptImage]) -> tuple[object, ...]:
    return encoder.prepare(wanted).result(_WAIT_S)


def test_embeddings_come_in_the_order_of_the_images() -> None:
    with running(FakeEncoding(2)) as encoder:
        assert embeddings(encoder, images(b"b", b"a", b"b")) == (b"b", b"a", b"b")


@pytest.mark.covers("B.images.12")
def test_a_repeated_image_is_not_encoded_and_needs_no_file() -> None:
    child = FakeEncoding(2)
    with running(child) as encoder:
        embeddings(encoder, images(b"a"))
        (known,) = images(b"a")
        without = PromptImage(0, 2, known.digest, known.grid)

        assert embeddings(encoder, (without,)) == (b"a",)
        load = load_of(encoder)

    assert child.encoded == [b"a"]
    assert (load.images_sought, load.images_found, load.images_encoded, load.images_waiting) == (2, 1, 1, 0)
    assert load.image_cache_bytes > 0


def test_prompts_that_wait_for_one_image_share_its_encoding() -> None:
    child = FakeEncoding(2, holds=True)
    with running(child) as encoder:
        first, second = encoder.prepare(images(b"a", b"b")), encoder.prepare(images(b"a"))
        child.go()
        assert second.result(_WAIT_S) == (b"a",)
        assert not first.done()
        child.go()

        assert first.result(_WAIT_S) == (b"a", b"b")
    assert child.encoded == [b"a", b"b"]


def test_an_image_that_nobody_waits_for_any_more_is_not_encoded() -> None:
    child = FakeEncoding(2, holds=True)
    with running(child) as encoder:
        first, gone, kept = (encoder.prepare(images(data)) for data in (b"a", b"b", b"c"))
        assert gone.cancel()
        child.go(3)
        first.result(_WAIT_S)

        assert kept.result(_WAIT_S) == (b"c",)
        assert load_of(encoder).images_waiting == 0
    assert child.encoded == [b"a", b"c"]


def test_a_cancelled_prompt_leaves_its_image_to_the_others() -> None:
    child = FakeEncoding(2, holds=True)
    with running(child) as encoder:
        gone, kept = encoder.prepare(images(b"a")), encoder.prepare(images(b"a"))
        gone.cancel()
        child.go()

        assert kept.result(_WAIT_S) == (b"a",)
    with pytest.raises(CancelledError):
        gone.result(0)


def test_a_broken_image_fails_its_prompts_alone() -> None:
    with running(FakeEncoding(2)) as encoder:
        bad, good = encoder.prepare(images(b"a", BROKEN)), encoder.prepare(images(b"b"))

        with pytest.raises(InvalidRequest, match="image 1: the image file is broken") as error:
            bad.result(_WAIT_S)
        assert error.value.param == "images.1"
        assert good.result(_WAIT_S) == (b"b",)


def test_another_number_of_tokens_is_an_error() -> None:
    with running(FakeEncoding(3)) as encoder, pytest.raises(InvalidRequest, match="image 0 has 3 tokens"):
        embeddings(encoder, images(b"a"))


def test_an_image_without_its_file_must_be_cached() -> None:
    with running(FakeEncoding(2), EncoderLimits(cache_bytes=0)) as encoder:
        embeddings(encoder, images(b"a"))

        with pytest.raises(InvalidRequest, match="not cached on this instance any more"):
            embeddings(encoder, (PromptImage(0, 2, images(b"a")[0].digest, (1, 1, 2)),))


def test_more_waiting_images_than_the_limit_are_refused() -> None:
    child = FakeEncoding(2, holds=True)
    with running(child, EncoderLimits(queue_length=1)) as encoder:
        first = encoder.prepare(images(b"a"))
        with pytest.raises(Overloaded, match="1 images wait to be encoded, the limit"):
            embeddings(encoder, images(b"b"))
        child.go()

        assert first.result(_WAIT_S) == (b"a",)


def test_closing_refuses_the_waiting_and_later_prompts() -> None:
    child = FakeEncoding(2, holds=True)
    with running(child) as encoder:
        encoded, waiting = encoder.prepare(images(b"a")), encoder.prepare(images(b"b"))
        assert child.begun.acquire(timeout=_WAIT_S)
        encoder._closed = True  # as close sets it first
        child.go()
        assert encoded.result(_WAIT_S) == (b"a",)

    for future in (waiting, encoder.prepare(images(b"c"))):
        with pytest.raises(Draining, match="shutting down"):
            future.result(_WAIT_S)
    assert (child.encoded, child.is_closed) == ([b"a"], True)


def test_a_tower_that_cannot_be_loaded_is_the_error_of_the_start() -> None:
    def fail() -> None:
        raise ConfigError("no vision tower")

    encoder = ImageEncoder(FakeEncoding(2, on_start=fail), EncoderLimits())

    with pytest.raises(ConfigError, match="no vision tower"):
        encoder.start()
    encoder.close()


def test_a_tower_that_loads_too_long_is_an_error_with_the_limit() -> None:
    loaded = threading.Event()
    encoder = ImageEncoder(FakeEncoding(2, on_start=lambda: loaded.wait(_WAIT_S)), EncoderLimits(start_s=0.01))

    with pytest.raises(Unavailable, match=r"not loaded within 0\.01 s"):
        encoder.start()
    loaded.set()
    encoder.close()
