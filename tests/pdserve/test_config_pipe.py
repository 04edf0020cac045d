"""start_servers.sh reads its flags more than once: a pipe for --config gives the same content each time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config_pipe import kept_config
from pdserve.flags.config_file import MAX_BYTES, read
from tests.ranktable_tools.documents import local, modelarts
from wire.errors import ConfigError


def _pipe(text: bytes) -> str:
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    return f"/proc/self/fd/{reading}"


def test_a_pipe_can_be_read_any_number_of_times() -> None:
    with kept_config(["--port=1", "--config", _pipe(b"model: /m\nport: 2\n"), "--", "x"]) as argv:
        path = argv[0].removeprefix("--config=")
        first, second = read(path), read(path)

    assert argv[1:] == ["--port=1", "--", "x"]
    assert [entry.key for entry in first] == ["model", "port"]
    assert first == second
    assert not Path(path).exists()


def test_a_pipe_with_too_much_data_is_refused_by_its_reader() -> None:
    text = b"#" * (MAX_BYTES + 1)
    (reading, writing) = os.pipe()
    with subprocess.Popen(["head", "-c", str(len(text)), "/dev/zero"], stdout=writing):
        os.close(writing)
        with kept_config([f"--config=/proc/self/fd/{reading}"]) as argv, pytest.raises(ConfigError, match="more than"):
            read(argv[0].removeprefix("--config="))
    os.close(reading)


@pytest.mark.parametrize(
    "words", [["--port", "1"], ["--config", "gone.yaml"], ["--config=/dev/fd/999"], ["--config=/tmp"]]
)
def test_a_foreign_pipe_is_left_unread(words: list[str]) -> None:
    with kept_config(words) as argv:
        assert argv == words


def test_start_servers_takes_its_flags_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps(modelarts()))
    (tmp_path / "l.json").write_text(json.dumps(local()))
    environ = {**os.environ, "GLOBAL_RANK_TABLE_FILE_PATH": "g.json", "RANK_TABLE_FILE_PATH": "l.json"}

    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdserve.launch", "--config", "/dev/stdin"], text=True, timeout=300, check=False,
        input="model: /no/model\nport: 8089\n", capture_output=True, cwd=tmp_path, env=environ,
    )  # fmt: skip

    assert done.returncode == 2
    assert "/no/model" in done.stderr
