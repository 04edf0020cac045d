"""Memory stays flat while a file of 100 MB is downloaded and uploaded."""

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from tests.remote_files.raw_server import RawServer, Request, ok, raw_server

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
PIECE = b"x" * 100_000
NUM_PIECES = 1000
# Prints by how many KiB this process's peak size has grown since a small file was transferred the same way.
CHILD = """
import asyncio, sys
from pathlib import Path
from remote_files.addresses import AddressRules
from remote_files.download import download
from remote_files.upload import upload

rules, path = AddressRules.of(["127.0.0.1"]), Path(sys.argv[2])

async def both(num_pieces):
    url = f"{sys.argv[1]}/{num_pieces}"
    assert await download(url, path, rules=rules) == num_pieces * 100_000
    assert await upload(path, url, rules=rules) == num_pieces * 100_000

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

try:
    from uvloop import new_event_loop
except ImportError:
    new_event_loop = None
with asyncio.Runner(loop_factory=new_event_loop) as runner:
    runner.run(both(100))
    before = peak()
    runner.run(both(1000))
print(peak() - before)
"""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The server's loop; the transfers have one of their own."""
    return "asyncio"


class Store:
    """Has files of as many pieces as a path says, and counts the received bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def __call__(self, request: Request) -> None:
        num_pieces = int(request.target.strip("/"))
        if request.line.startswith("PUT"):
            await request.say(b"HTTP/1.1 100 Continue\r\n\r\n")
            left = int(request.headers["content-length"])
            while left:
                left -= len(await request.reader.read(left))
            self.num_bytes += int(request.headers["content-length"])
            await request.say(ok(b""))
        else:
            await request.say(f"HTTP/1.1 200 OK\r\nContent-Length: {num_pieces * len(PIECE)}\r\n\r\n".encode())
            for _ in range(num_pieces):
                await request.say(PIECE)


@pytest.mark.covers("A1.13")
async def test_a_file_of_100_mb_streams_with_memory_flat(tmp_path: Path) -> None:
    path = tmp_path / "file"
    store = Store()
    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        async with raw_server(store) as server:
            grown_kib = await _grown_kib(server, path)

    assert store.num_bytes == 1100 * len(PIECE)
    assert grown_kib < 8 * 1024


async def _grown_kib(server: RawServer, path: Path) -> int:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, server.url(""), str(path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    return int(out)
