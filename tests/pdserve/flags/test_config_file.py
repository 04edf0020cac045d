"""--config is one flat mapping with a line for each key, and nothing else."""

import os
from pathlib import Path

import pytest

from pdserve.flags.config_file import MAX_BYTES, read
from wire.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def test_keys_and_values_are_read_as_written(file: Path) -> None:
    file.write_text("# ours\nmodel: /m\nport: 0900\nkv_links: !!int 3\nnames: [a, 'b c']\nlist:\n- 1GiB\n- \"yes\"\n")

    entries = read(str(file))

    assert [(entry.flag, tuple(value.text for value in entry.values)) for entry in entries] == [
        ("--model", ("/m",)), ("--port", ("0900",)), ("--kv-links", ("3",)), ("--names", ("a", "b c")),
        ("--list", ("1GiB", "yes")),
    ]  # fmt: skip
    assert [entry.place for entry in entries[:2]] == [f"{file}:2", f"{file}:3"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}\n"])
def test_an_empty_file_sets_nothing(file: Path, text: str) -> None:
    file.write_text(text)

    assert read(str(file)) == ()


@pytest.mark.parametrize(("written", "message"), [("yes", True), ("off", False), ("True", True), ("'true'", None)])
def test_a_switch_is_an_unquoted_boolean(file: Path, written: str, message: bool | None) -> None:
    file.write_text(f"detach: {written}\n")

    assert read(str(file))[0].values[0].boolean is message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nhost: a\nport: 2\n", ":3: port is already on line 1"),
        ("max_n: 1\nmax-n: 2\n", ":2: max-n is already on line 1"),
        ("model: m\nport:\n", ":2: port has no value: leave the line out"),
        ("port: null\n", ":1: port has no value"),
        ("port: [1, ]\nhost: []\n", ":2: host is an empty list"),
        ("scheduler:\n  port: 1\n", ":2: scheduler must be a value or a list of values, nothing nested"),
        ("a: [[1]]\n", ":1: a must be a value or a list of values, nothing nested"),
        ("- port\n", ":1: the file must be a mapping"),
        ("port\n", ":1: the file must be a mapping"),
        ("? [a]\n: 1\n", ":1: a key must be the name of a flag"),
        ("a: &x 1\nb: *x\n", r":2: \*x is an alias: write the value out"),
        (
            "a: !!python/object/apply:os.system [id]\n",
            ":1: a has the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("a: !!python/name:os.system ''\n", ":1: a has the tag 'tag:yaml.org,2002:python/name:os.system'"),
        ("a: !!binary aGk=\n", ":1: a has the tag"),
        ("a: 1\n---\nb: 2\n", ":3: the file must be a single YAML document"),
        ("a: 1\nb: [1\nc: 2\n", ":3: invalid YAML"),
        ("a: 1\n\tb: 2\n", ":2: invalid YAML"),
        ("a: \x01\n", ": invalid YAML"),
    ],
)
def test_anything_else_is_refused_with_its_line(file: Path, text: str, words: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError, match=words):
        read(str(file))


def test_a_pipe_without_a_writer_is_refused_and_a_shells_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    out, into = os.pipe()
    os.write(into, b"port: 1\n")
    os.close(into)

    with pytest.raises(ConfigError, match=rf"--config {tmp_path}/pipe is not a regular file: use a YAML file"):
        read(str(tmp_path / "pipe"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(str(tmp_path))
    assert [entry.key for entry in read(f"/dev/fd/{out}")] == ["port"]
    os.close(out)


def test_an_alias_bomb_ends_at_its_first_nesting(file: Path) -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30)]
    file.write_text("\n".join(["l0: &l0 [x, x, x]", *levels]) + "\n")

    with pytest.raises(ConfigError, match=r":2: \*l0 is an alias"):
        read(str(file))


@pytest.mark.parametrize("text", ["[" * 60_000, "a: " + "[" * 60_000, "{a: " * 15_000])
def test_deep_nesting_is_refused_before_it_is_followed(file: Path, text: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError, match=r":1: "):
        read(str(file))


def test_large_missing_and_binary_files_are_refused(file: Path) -> None:
    file.write_text("a: " + "x" * MAX_BYTES)
    with pytest.raises(ConfigError, match=f"more than {MAX_BYTES} bytes"):
        read(str(file))
    file.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        read(str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(str(file) + "x")
