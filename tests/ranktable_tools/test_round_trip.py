"""What gen writes reads back equal, and what it writes on several hosts merges into all of it."""

import itertools
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.dialects.modelarts import global_text
from ranktable_tools.errors import RanktableError
from ranktable_tools.generate import Generated, GenRequest, check_request
from ranktable_tools.launch_plan import resolve
from ranktable_tools.merge_files import merge_files
from ranktable_tools.table_file import read_global, read_local, read_part
from tests.examples import examples


@st.composite
def _instances(draw: st.DrawFn) -> tuple[list[list[str]], list[list[str]]]:
    ids = draw(st.lists(st.integers(0, 15).map(str), min_size=2, max_size=8, unique=True))
    cuts = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1, max_size=3))
    edges = [0, *sorted(cuts), len(ids)]
    groups = [ids[start:end] for start, end in itertools.pairwise(edges)]
    split = draw(st.integers(1, len(groups) - 1))
    return groups[:split], groups[split:]


def _has_unique_names(prefill: list[list[str]], decode: list[list[str]]) -> bool:
    names = ["".join(ids) for ids in (*prefill, *decode)]
    return len(set(names)) == len(names)


def _gen(host: int, lists: tuple[list[list[str]], list[list[str]]], folder: str, with_ports: bool) -> Generated:
    prefill, decode = lists
    count = len(prefill) + len(decode)
    ports = ",".join(str(8000 + number) for number in range(count)) if with_ports else None
    typed = [[",".join(ids) for ids in group] for group in (prefill, decode)]
    arguments = GenArguments(typed[0], typed[1], host == 0, folder, f"10.7.0.{host}", ports, "cpu")
    return gen(arguments, lambda line: None, {})


@examples(40)
@given(hosts=st.lists(_instances(), min_size=2, max_size=3), with_ports=st.booleans())
def test_gen_read_and_merge_lose_nothing(
    hosts: list[tuple[list[list[str]], list[list[str]]]], with_ports: bool
) -> None:
    hosts = [lists for lists in hosts if _has_unique_names(*lists)]
    if len(hosts) < 2:
        return
    with tempfile.TemporaryDirectory() as folder:
        made = [_gen(host, lists, folder, with_ports) for host, lists in enumerate(hosts)]
        paths = [str(Path(folder, generated.global_name)) for generated in made]
        merged = merge_files(paths, folder, lambda line: None)
        path = str(Path(folder, "global_ranktable_merge.json"))

        assert [read_part(path) for path in paths] == [generated.part for generated in made]
        assert read_global(path) == merged
        assert Path(path).read_text() == global_text(merged)
        assert merged.prefill == tuple(server for generated in made for server in generated.part.prefill)
        assert merged.decode == tuple(server for generated in made for server in generated.part.decode)
        found = []
        for generated in made:
            for local in generated.instances:
                local_path = str(Path(folder, local.file_name))
                assert read_local(local_path) == local.table
                environ = {"GLOBAL_RANK_TABLE_FILE_PATH": path, "RANK_TABLE_FILE_PATH": local_path}
                found.append(resolve(environ).index)
        assert sorted(index for index in found if index is not None) == list(range(len(merged.instances)))


@given(
    prefill=st.lists(st.lists(st.integers(0, 130).map(str), min_size=1, max_size=3), max_size=4),
    decode=st.lists(st.lists(st.integers(0, 130).map(str), min_size=1, max_size=3), max_size=4),
)
def test_gen_succeeds_exactly_if_devices_and_file_names_are_unique(
    prefill: list[list[str]], decode: list[list[str]]
) -> None:
    request = GenRequest(tuple(map(tuple, prefill)), tuple(map(tuple, decode)), with_scheduler=True, ip="10.0.0.1")
    names = ["".join(ids) for ids in (*prefill, *decode)]
    ids = request.device_ids
    good = len(set(ids)) == len(ids) and len(set(names)) == len(names)

    try:
        check_request(request)
    except RanktableError:
        assert not good
    else:
        assert good
