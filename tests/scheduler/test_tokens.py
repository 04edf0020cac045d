"""What the scheduler reads from a model's folder, and text to token ids."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from scheduler.model.files import read_model_files
from scheduler.tokens import Tokens
from wire.errors import ConfigError, PromptTooLong

MakeModel = Callable[..., Path]


def edit(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["hello", "hello world " * 90 * 5, "你好 🎉\n\t", "<|im_start|>user"])
async def test_ids_equal_the_tokenizers_own_for_short_and_long_texts(model_folder: Path, text: str) -> None:
    tokens = Tokens(read_model_files(str(model_folder)))
    tokens.max_model_len = 10_000

    ids = await tokens.encode(text, add_special_tokens=True)

    assert list(ids) == Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text).ids


@pytest.mark.anyio
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tokens: Tokens) -> None:
    with pytest.raises(PromptTooLong, match="maximum context length is 512 tokens; the prompt has 1000000 characters"):
        await tokens.encode("a" * 1_000_000, add_special_tokens=True)


@pytest.mark.parametrize(("add_bos", "expected"), [(True, 1), (False, 0), (None, 0)])
def test_add_bos_token_of_the_config_is_applied(make_model: MakeModel, add_bos: bool | None, expected: int) -> None:
    tokens = Tokens(read_model_files(str(make_model(add_bos_token=add_bos))))
    bos = Tokenizer.from_file(str(tokens.files.folder / "tokenizer.json")).token_to_id("<|endoftext|>")

    assert tokens._encode("hello", True).count(bos) == expected
    assert tokens._encode("hello", False).count(bos) == 0


def test_eos_ids_are_those_of_all_files(make_model: MakeModel) -> None:
    folder = make_model()
    edit(folder / "config.json", eos_token_id=[7, 8])
    edit(folder / "generation_config.json", eos_token_id=9)

    tokens = Tokens(read_model_files(str(folder)))

    im_end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    assert tokens.eos_token_ids == (9, 7, 8, im_end)


def test_the_vocabulary_is_as_large_as_the_models_output(make_model: MakeModel) -> None:
    folder = make_model()
    assert Tokens(read_model_files(str(folder))).vocab_size == 384

    edit(folder / "config.json", vocab_size=None)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert Tokens(read_model_files(str(folder))).vocab_size == size


@pytest.mark.parametrize(("limit", "expected"), [(None, 512), (100, 100), (9999, 512)])
def test_the_length_is_the_models_bounded_by_the_flag(model_folder: Path, limit: int | None, expected: int) -> None:
    assert read_model_files(str(model_folder), limit).max_model_len == expected


def test_the_text_part_of_a_nested_config_is_read(make_model: MakeModel) -> None:
    folder = make_model()
    edit(folder / "config.json", max_position_embeddings=None, vocab_size=None)
    edit(folder / "config.json", text_config={"max_position_embeddings": 77, "vocab_size": 99})

    files = read_model_files(str(folder))

    assert (files.max_model_len, files.vocab_size) == (77, 99)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [(None, ()), ('{"is_matryoshka": false}', None), ('{"matryoshka_dimensions": [8]}', (8,))],
)
def test_overrides_name_the_dimensions_of_vectors(
    model_folder: Path, overrides: str | None, expected: tuple[int, ...] | None
) -> None:
    assert read_model_files(str(model_folder), overrides=overrides).dimensions == expected


def test_a_model_without_a_length_needs_the_flag(make_model: MakeModel) -> None:
    folder = make_model()
    edit(folder / "config.json", max_position_embeddings=None)

    assert read_model_files(str(folder), 64).max_model_len == 64
    with pytest.raises(ConfigError, match="--max-model-len"):
        read_model_files(str(folder))


def test_the_flag_overrides_the_jinja_file_and_that_the_config(make_model: MakeModel, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = make_model(chat_template=named)
    assert read_model_files(str(folder)).chat_template == "d"

    (folder / "chat_template.jinja").write_text("j")
    assert read_model_files(str(folder)).chat_template == "j"

    (tmp_path / "given.jinja").write_text("f")
    assert read_model_files(str(folder), chat_template=str(tmp_path / "given.jinja")).chat_template == "f"
    assert read_model_files(str(folder), chat_template="{{ inline }}").chat_template == "{{ inline }}"


def test_a_template_file_that_does_not_exist_is_named(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template \./nothing\.jinja is neither a readable file"):
        read_model_files(str(model_folder), chat_template="./nothing.jinja")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, r"config\.json is missing"),
        ("config.json", "{", r"config\.json cannot be read as JSON"),
        ("config.json", "[]", r"config\.json contains a value of type list"),
        ("tokenizer.json", None, r"tokenizer\.json is missing"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer"),
    ],
)
def test_a_bad_file_is_named(make_model: MakeModel, file: str, content: str | None, words: str) -> None:
    folder = make_model()
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)

    with pytest.raises(ConfigError, match=words):
        Tokens(read_model_files(str(folder)))


def test_a_model_that_is_not_a_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="--model /nowhere is not a folder"):
        read_model_files("/nowhere")
