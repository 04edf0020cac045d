"""Whatever a file contains, lint answers in lines and never raises."""

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable_tools.cli import main
from ranktable_tools.dialects.modelarts import global_text
from ranktable_tools.errors import RanktableError
from ranktable_tools.lint import lint
from ranktable_tools.table_file import read_global, read_local, read_part
from ranktable_tools.tables import GlobalTable, TableDevice, TableServer
from tests.examples import examples
from tests.ranktable_tools.documents import SAMPLES, A, B, Document, modelarts, server

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
HOST = TableServer("localhost", "localhost")
PREFILL = TableServer(
    "localhost", "localhost", (TableDevice("4", "10.0.0.22", "0"), TableDevice("5", "10.0.0.23", "1"))
)
DECODE = TableServer(
    "localhost", "localhost", (TableDevice("6", "29.0.0.56", "0"), TableDevice("7", "29.0.0.72", "1")), 8089
)
GOOD = json.loads(global_text(GlobalTable(HOST, (PREFILL,), (DECODE,))))


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(deeper for key, member in members for deeper in _places(member, (*place, key)))]


def _replace_value(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.deepcopy(document)
    target = changed
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return changed


@pytest.mark.parametrize(
    "table",
    [
        modelarts([server(A, 0, 1, worker="vllm")], [server(A, 2, 3, worker="vllm"), server(B, 0, worker="vllm")]),
        modelarts([server(A, 0, 1, worker="vllm-ascend")], [server(B, 0, worker="vllm-ascend")]),
        modelarts([server(A, 0), server(A, 1, worker="vllm")], [server(B, 0), server(B, 1, worker="vllm")]),
        modelarts([server(A, worker="vllm", url=f"http://{A}:1")], [server(A, worker="vllm", url=f"http://{A}:2")]),
        modelarts([server(A, worker="vllm", url=f"http://{A}:1")], [server(A, worker="vllm", url=f"http://{A}:1/")]),
        modelarts([server("localhost", worker="vllm", url="http://localhost:1")], [server(A, worker="vllm")]),
    ],
)
def test_workers_that_fit_are_no_error(tmp_path: Path, table: Document) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table))

    assert [str(finding) for finding in lint([str(path)]) if finding.severity == "error"] == []


def _refusal(read: Callable[[str], object], path: str) -> str:
    try:
        read(path)
    except RanktableError as error:
        return str(error)
    return ""


@examples(150)
@given(place=st.sampled_from(_places(GOOD)), value=JSON)
def test_any_table_is_read_or_refused_with_one_line_per_fault(place: tuple[Any, ...], value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "t.json"))
        Path(path).write_text(json.dumps(_replace_value(GOOD, place, value)))

        lines = [str(finding) for finding in lint([path]) if finding.severity == "error"]

        assert all(line.startswith(f"{path}: ") and len(line.splitlines()) == 1 for line in lines)
        refusals = [_refusal(read, path) for read in (read_global, read_part, read_local)]
        assert all(len(refusal.splitlines()) <= 1 for refusal in refusals)
        if isinstance(value, dict) and not place:
            assert lines
        else:
            assert bool(lines) == bool(refusals[0])


@examples(40)
@given(data=st.data(), value=JSON | st.sampled_from(["0", "1", "2", "1.2", "10.**.**.1", "completed"]))
def test_every_command_answers_any_table_of_any_dialect(data: st.DataObject, value: Any) -> None:
    name = data.draw(st.sampled_from(sorted(SAMPLES)))
    document = SAMPLES[name]()
    place = data.draw(st.sampled_from(_places(document)))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "t.json"))
        Path(path).write_text(json.dumps(_replace_value(document, place, value)))
        commands = [
            ["lint", path],
            ["lint", path, "--dialect", name, "--strict", "--share-devices"],
            ["show", path, "--dialect", name],
            [
                "convert",
                path,
                "--dialect",
                name,
                "--to",
                "modelarts",
                "--num-prefill",
                "1",
                "--api-server",
                "192.0.2.1",
            ],
            ["convert", path, "--dialect", name, "--to", "hccl-1.2", "--instance", "instance-0"],
            ["diff", path, path, "--dialect", name],
        ]

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            statuses = [main(command) for command in commands]

        assert set(statuses) <= {0, 2}
        assert all(line.startswith(("ranktable: ", "note: ")) for line in errors.getvalue().splitlines())


@given(content=st.binary(max_size=60))
def test_any_bytes_are_answered_in_lines(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "t.json"))
        Path(path).write_bytes(content)

        assert all(len(str(finding).splitlines()) == 1 for finding in lint([path]))


def test_a_good_table_has_no_problems(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(GOOD))

    assert lint([str(path)]) == []


def test_a_large_table_is_checked_host_by_host(tmp_path: Path) -> None:
    servers = [
        TableServer(ip, ip, tuple(TableDevice(str(number), ip, str(number)) for number in range(8)), 8088)
        for ip in (f"10.50.{host // 250}.{host % 250 + 1}" for host in range(200))
    ]
    path = tmp_path / "t.json"
    path.write_text(
        global_text(
            GlobalTable(replace(servers[0], devices=(), server_port=9000), tuple(servers[:100]), tuple(servers[100:]))
        )
    )

    assert lint([str(path)]) == []
