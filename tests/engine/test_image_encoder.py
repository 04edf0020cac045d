"""The image encoder: each image once, its cache, prompts that wait, are cancelled or fail alone."""

import hashlib
import struct
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
def running(
    child: FakeEncoding, limits: EncoderLimits | None = None, dtype: str = "float32"
) -> Iterator[ImageEncoder]:  # fmt: skip
    encoder = ImageEncoder(child, limits or EncoderLimits(), dtype)
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


@pytest.mark.parametrize(
    ("sent", "engine", "values", "expected"),
    [
        ("float32", "float32", "cdcccc3d0000c03f", "cdcccc3d0000c03f"),
        ("float32", "bfloat16", "cdcccc3d0000c03f", "cd3dc03f"),
        ("float32", "float16", "cdcccc3d0000c03f", "662e003e"),
        ("bfloat16", "float32", "cd3dc03f", "0000cd3d0000c03f"),
        ("bfloat16", "float16", "cd3dc03f", "682e003e"),
        ("float16", "float32", "662e003e", "00c0cc3d0000c03f"),
    ],
)
def test_sent_embeddings_take_the_engines_type_and_no_child(
    sent: str, engine: str, values: str, expected: str
) -> None:  # fmt: skip
    child, given = FakeEncoding(2), PromptImage(10, 2, b"e" * 32, (1, 1, 2), bytes.fromhex(values), sent)
    with running(child, dtype=engine) as encoder:
        assert embeddings(encoder, (*images(b"a"), given)) == (b"a", bytes.fromhex(expected))
        load = load_of(encoder)

    assert child.encoded == [b"a"]
    assert (load.images_sought, load.images_encoded) == (1, 1), "those of files"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (b"", "image 1: its embeddings have 0 bytes, but must have a positive multiple of 8"),
        (bytes(9), "image 1: its embeddings have 9 bytes, but must have a positive multiple of 8"),
        (struct.pack("<2f", 7e4, -0.5), "image 1: its embeddings have a magnitude of 70000, out of range for float16"),
    ],
)
def test_sent_embeddings_that_the_engine_cannot_take_are_refused(values: bytes, error: str) -> None:
    given = PromptImage(10, 2, b"e" * 32, (1, 1, 2), values, "float32")
    with running(FakeEncoding(2), dtype="float16") as encoder:
        with pytest.raises(InvalidRequest, match=error) as caught:
            embeddings(encoder, (*images(b"a"), given))

        assert caught.value.param == "images.1"
        assert embeddings(encoder, images(b"a")) == (b"a",)


def test_more_waiting_images_than_the_limit_are_refused() -> None:
    child = FakeEncoding(2, holds=True)
    with running(child, EncoderLimits(queue_length=1)) as encoder:
        first = encoder.prepare(images(b"a"))
        with pytest.raises(Overloaded, match="images that wait to be encoded is 1, the limit"):
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
