"""Placeholders become the ids of transformers' processors, which repeat the token in the text before they encode it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from images.families import VisionFamily
from images.token_count import FixedCount
from scheduler.images.image_part import LoadedImage
from scheduler.images.placeholders import Placeholders
from tests.examples import examples
from wire.errors import ConfigError, InvalidRequest

BEGIN, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE in which newlines merge, with the tokens of an image."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a\n\nb\n\n\n\n", "\n\n\n<image>", "the image start of"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BEGIN, SOFT, END)])
    return tokenizer


TOKENIZER = make_tokenizer()
BEGIN_ID, SOFT_ID, END_ID = (int(TOKENIZER.token_to_id(text) or 0) for text in (BEGIN, SOFT, END))
PLAIN = VisionFamily("llava", SOFT_ID, SOFT_ID, FixedCount(3))
ENCLOSED = VisionFamily("gemma3", BEGIN_ID, SOFT_ID, FixedCount(3), (BEGIN_ID,), (END_ID,), "\n\n")
FAMILIES = [(PLAIN, SOFT, "{}"), (ENCLOSED, BEGIN, f"\n\n{BEGIN}{{}}{END}\n\n")]
_TEXTS = st.text(st.sampled_from("a \n<image>_ofst"), max_size=12)


def loaded(count: int) -> LoadedImage:
    """Return an image of so many tokens."""
    return LoadedImage(bytes([count]), count, (1, 1, count), bytes(32), "messages.0.content.0")


def ids_of(text: str) -> list[int]:
    """Return the ids of a text."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(("family", "text", "whole"), FAMILIES, ids=["llava", "gemma3"])
@examples(100)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=4), data=st.data())
def test_ids_equal_those_of_the_expanded_text(family: Any, text: str, whole: str, texts: list[str], data: Any) -> None:
    images = [loaded(data.draw(st.integers(1, 5))) for _ in texts[1:]]
    holders = Placeholders(family, TOKENIZER)
    shown, is_image = holders.show(text.join(texts), len(images))
    prompt = holders.expand(ids_of(shown), is_image, images)

    expanded = texts[0]
    for image, after in zip(images, texts[1:], strict=True):
        expanded += whole.format(SOFT * image.count) + after
    assert list(prompt.token_ids) == ids_of(expanded)
    for image, placed in zip(images, prompt.images, strict=True):
        assert (placed.count, placed.data) == (image.count, image.data)
        assert prompt.token_ids[placed.start : placed.start + placed.count] == (SOFT_ID,) * image.count


@pytest.mark.parametrize(("family", "text", "whole"), FAMILIES, ids=["llava", "gemma3"])
@examples(50)
@given(before=_TEXTS, after=_TEXTS)
def test_typed_placeholders_are_spelled_and_lose_no_character(
    family: Any, text: str, whole: str, before: str, after: str
) -> None:
    holders = Placeholders(family, TOKENIZER)
    typed = f"{before}{text}{after}"
    (hidden,) = holders.hide([{"content": typed, text: 1}])
    assert text not in str(hidden)
    shown, is_image = holders.show(hidden["content"], 0)
    prompt = holders.expand(ids_of(shown), is_image, [])

    assert prompt.images == ()
    assert family.placeholder_id not in prompt.token_ids
    assert TOKENIZER.decode(list(prompt.token_ids), skip_special_tokens=False) == typed


def test_a_template_of_texts_gets_the_tokens_around_an_image_too() -> None:
    enclosed = VisionFamily("qwen2_vl", SOFT_ID, SOFT_ID, FixedCount(3), written_ids=(BEGIN_ID, SOFT_ID, END_ID))

    assert Placeholders(PLAIN, TOKENIZER).written == SOFT
    assert Placeholders(enclosed, TOKENIZER).written == f"{BEGIN}{SOFT}{END}"


def test_another_number_of_placeholders_is_refused() -> None:
    holders = Placeholders(PLAIN, TOKENIZER)
    for rendered, count in ((SOFT, 0), ("none", 1), (SOFT * 3, 2)):
        with pytest.raises(InvalidRequest, match=rf"placeholders? \(<image_soft_token>\) for {count} images?"):
            holders.show(rendered, count)


def test_a_tokenizer_without_the_placeholder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no token 10000, which config.json names for images"):
        Placeholders(VisionFamily("llava", 10_000, 10_000, FixedCount(3)), TOKENIZER)
