"""What an LLM opens leaves nothing behind if opening fails."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from pdserve.offline import sources


def test_a_pair_that_finds_no_port_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(count: int, host: str) -> tuple[int, ...]:
        raise OSError("no port is left")

    async def opened() -> None:
        async with sources.open_pair((), 1, 1, connections=1, startup_timeout_s=1.0):
            pass

    monkeypatch.setattr(sources, "free_ports", none_left)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(OSError, match="no port is left"):
        asyncio.run(opened())

    assert list(tmp_path.iterdir()) == []
