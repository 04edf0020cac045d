"""Text one token at a time, compared with the tokenizer's own decoding of all tokens at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scheduler.model.files import ModelFiles, read_model_files
from scheduler.text.detokenizer import WindowDecoder, detokenizer_of
from scheduler.tokens import Tokens
from tests.examples import examples


@pytest.fixture(scope="session", params=["bytes", "window"])
def tokens(request: pytest.FixtureRequest, model_folder: Path) -> Tokens:
    """The tiny model's tokens, with known bytes and without: every test here runs with both decoders."""
    made = Tokens(read_model_files(str(model_folder)))
    assert made.byte_level is not None
    if request.param == "window":
        made.byte_level = None
    return made


def _push_all(tokens: Tokens, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = detokenizer_of(tokens, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(tokens: Tokens, text: str) -> None:
    ids = list(tokens._encode(text, False))

    assert "".join(_push_all(tokens, ids)) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 322), max_size=60))
def test_any_tokens_give_the_tokenizers_own_text(tokens: Tokens, ids: list[int]) -> None:
    for skip in (True, False):
        expected = tokens.decode(ids, skip_special_tokens=skip)

        assert "".join(_push_all(tokens, ids, skip_special_tokens=skip)) == expected


def test_a_character_is_emitted_whole_with_its_last_token(tokens: Tokens) -> None:
    ids = list(tokens._encode("你好🎉", False))

    pieces = _push_all(tokens, ids)

    assert [piece for piece in pieces if piece] == ["你", "好", "🎉"]
    assert [bool(piece) for piece in pieces[:3]] == [False, False, True]


def test_invalid_bytes_are_emitted_at_constant_cost(tokens: Tokens) -> None:
    broken = tokens._encode("你", False)[1]
    detokenizer = detokenizer_of(tokens)

    text = "".join(detokenizer.push(broken) for _ in range(500)) + detokenizer.flush()

    assert text == "\ufffd" * 500
    assert not isinstance(detokenizer, WindowDecoder) or len(detokenizer._window) <= 16


def test_special_tokens_are_skipped_or_shown(tokens: Tokens) -> None:
    end = tokens.eos_token_ids[0]
    ids = [*tokens._encode("a", False), end, *tokens._encode("b", False)]

    assert "".join(_push_all(tokens, ids)) == "ab"
    assert "".join(_push_all(tokens, ids, skip_special_tokens=False)) == "a<|im_end|>b"


def test_an_id_without_a_token_has_no_text(tokens: Tokens) -> None:
    assert "".join(_push_all(tokens, [383, 383])) == ""


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Tokens like Llama 2's: ▁ for spaces, byte tokens, and a decoder that strips the first space."""
    pieces = ["<unk>", "▁hello", "▁world", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder: Path = tmp_path_factory.mktemp("spaced")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokens(ModelFiles(folder, None, 100, (), None, None))


def test_spaces_between_words_survive_a_decoder_that_strips_the_first(spaced: Tokens) -> None:
    assert "".join(_push_all(spaced, [1, 2, 2])) == "hello world world"


def test_the_first_word_keeps_its_space_after_a_prompt(spaced: Tokens) -> None:
    detokenizer = detokenizer_of(spaced, context=(1,))

    assert detokenizer.push(2) == " world"


def test_byte_tokens_join_to_characters(spaced: Tokens) -> None:
    ids = [1, *(5 + byte for byte in "你好🎉".encode()), 2]

    assert [piece for piece in _push_all(spaced, ids) if piece] == ["hello", "你", "好", "🎉", " world"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Whole words, which decoding joins with spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    folder: Path = tmp_path_factory.mktemp("words")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokens(ModelFiles(folder, None, 100, (), None, None))


@pytest.mark.parametrize(("spaces", "text"), [(True, "one <a> <b> two <a>"), (False, "one <a><b> two <a>")])
def test_special_tokens_are_joined_without_spaces_if_configured(words: Tokens, spaces: bool, text: str) -> None:
    detokenizer = detokenizer_of(words, skip_special_tokens=False, spaces_between_special_tokens=spaces)

    assert "".join(map(detokenizer.push, (1, 3, 4, 2, 3))) + detokenizer.flush() == text


@examples(50)
@given(ids=st.lists(st.integers(0, 322), max_size=40))
def test_text_is_that_of_transformers_decode(tokens: Tokens, ids: list[int]) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tokens.files.folder / "tokenizer.json"))

    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert "".join(_push_all(tokens, ids, skip_special_tokens=skip)) == expected


@examples(50)
@given(ids=st.lists(st.integers(0, 263), max_size=20))
def test_added_tokens_decode_as_with_the_tokenizer(odd: Tokens, ids: list[int]) -> None:
    assert odd.byte_level is not None
    for skip in (True, False):
        assert "".join(_push_all(odd, ids, skip_special_tokens=skip)) == odd.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """A byte-level tokenizer whose added tokens look like bytes, have spaces, or are outside its alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<\uff5cend\u2581of\uff5c>", "é", "ĠĊ")])
    tokenizer.add_tokens(["two words", "naïve", "中", "ÿ"])
    folder: Path = tmp_path_factory.mktemp("odd")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokens(ModelFiles(folder, None, 100, (), None, None))
