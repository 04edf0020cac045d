"""Where a chat template is read from."""

import json
from pathlib import Path

import pytest

from scheduler.templates.files import given_template, own_template
from wire.errors import ConfigError

NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


def test_the_models_template_is_read_from_the_newest_place_first(tmp_path: Path) -> None:
    assert own_template(tmp_path, {}) is None

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert own_template(tmp_path, {}) == "j"
    assert own_template(tmp_path, {"chat_template": "c"}) == "c"
    assert own_template(tmp_path, {"chat_template": NAMED}) == "d"

    (tmp_path / "chat_template.jinja").write_text("f")
    assert own_template(tmp_path, {"chat_template": "c"}) == "f"


@pytest.mark.parametrize("config", [{"chat_template": 1}, {"chat_template": [1, {"name": "tool_use"}]}, {}])
def test_a_config_without_a_string_template_has_none(tmp_path: Path, config: dict[str, object]) -> None:
    assert own_template(tmp_path, config) is None


def test_the_option_is_a_file_or_the_name_of_a_models_template(tmp_path: Path) -> None:
    (tmp_path / "given.jinja").write_text("f\\n")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")

    assert given_template(str(tmp_path / "given.jinja"), tmp_path, {}) == "f\\n"
    assert given_template("tool_use", tmp_path, {"chat_template": NAMED}) == "t"
    assert given_template("rag", tmp_path, {}) == "r"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("{{ messages }}", "{{ messages }}"),
        (
            r"{% for m in messages %}{{ m.content }}\n{% endfor %}",
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        ),
        (r"{{ a }}\t\r\\n你", "{{ a }}\t\r\\n你"),
        ("{{ a }}\n" r"\n", "{{ a }}\n" r"\n"),
        ("{{ a }}" + "x" * 10_000, "{{ a }}" + "x" * 10_000),
    ],
)
def test_the_option_may_be_the_template_itself(tmp_path: Path, typed: str, meant: str) -> None:
    assert given_template(typed, tmp_path, {}) == meant


@pytest.mark.parametrize("given", ["./examples/nothing.jinja", "tool_use", "chatml", "a\0b"])
def test_an_unknown_template_is_named(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="is neither a readable file, nor the name of one of the model's templates"):
        given_template(given, tmp_path, {})


def test_a_folder_is_not_a_template_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a readable file"):
        given_template(str(tmp_path), tmp_path, {})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(ConfigError, match=r"chat_template\.jinja is not UTF-8"):
        given_template(str(tmp_path / "chat_template.jinja"), tmp_path, {})
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        own_template(tmp_path, {})

    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ConfigError, match=r"chat_template\.json cannot be read as JSON"):
        own_template(tmp_path, {})
