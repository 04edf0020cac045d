"""A stand-in for docker on PATH, and tables to start containers from."""

import os
from pathlib import Path

import pytest

from ranktable_tools.generate import GenRequest, build
from ranktable_tools.table_file import write_global, write_local
from tests.deploy.docker_run_case import Make
from tests.deploy.stub_docker import StubDocker


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubDocker:
    """A docker with no container; no variable of the guide is set."""
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"):
        monkeypatch.delenv(name, raising=False)
    stub = StubDocker(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{stub.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "execv", _not_here)
    return stub


@pytest.fixture
def tables(tmp_path: Path) -> Make:
    """Write the tables of these instances, all on one host; return the flag of the global one."""

    def make(prefill: str = "4,5", decode: str = "6,7", ip: str = "127.0.0.1", npu: bool = True) -> list[str]:
        lists = [tuple(tuple(ids.split(",")) for ids in text.split()) for text in (prefill, decode)]
        request = GenRequest(lists[0], lists[1], True, ip)
        addresses = {one: f"10.1.0.{one}" if npu else ip for one in request.device_ids}
        generated = build(request, addresses)
        write_global(tmp_path / "global.json", generated.part)
        for local in generated.locals:
            write_local(tmp_path / local.file_name.replace(f"_{ip}", ""), local.table)
        return ["--global-table", str(tmp_path / "global.json")]

    return make


def _not_here(path: str, words: list[str]) -> None:
    """Anything that would replace the tests' own process fails instead."""
    raise AssertionError(f"would have become {words}")
