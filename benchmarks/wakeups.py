"""The cost of single messages to a process that only reads them: the lower bound for one stream in frontdoor.py.

    python benchmarks/wakeups.py

A peer process sends a message of 300 bytes every 5 ms; ours only reads it on uvloop, over gRPC (like the scheduler from
its instances) and from a plain socket. The CPU time is that of all threads of the reading process.
"""

import argparse
import asyncio
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop

HOST = "127.0.0.1"
GAP_S = 0.005
COUNT = 1000
MESSAGE = b"x" * 300
_EOF: Any = vars(grpc.aio)["EOF"]  # the stubs lack it


def main() -> None:
    """Print both costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--send", choices=("grpc", "socket"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send is not None:
        uvloop.run(_send_grpc() if args.send == "grpc" else _send_socket())
        return
    for kind, read in (("grpc", _read_grpc), ("socket", _read_socket)):
        command = [sys.executable, __file__, "--send", kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdout is not None
            seconds = uvloop.run(read(int(peer.stdout.readline())))
            peer.kill()
        print(f"{kind:<7} {seconds / COUNT * 1e6:6.0f} us of CPU per message")


async def _send_grpc() -> None:
    async def messages(_: object, __: object) -> AsyncIterator[bytes]:
        for _number in range(COUNT + 1):
            yield MESSAGE
            await asyncio.sleep(GAP_S)

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(messages)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Peer", {"Talk": handler}),))
    print(server.add_insecure_port(f"{HOST}:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def _send_socket() -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _number in range(COUNT + 1):
            writer.write(MESSAGE)
            await asyncio.sleep(GAP_S)
        writer.close()

    server = await asyncio.start_server(talk, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _read_grpc(port: int) -> float:
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        call: Any = channel.stream_stream("/Peer/Talk")()
        await call.read()
        began = _cpu_s()
        while await call.read() is not _EOF:
            pass
        return _cpu_s() - began


async def _read_socket(port: int) -> float:
    reader, writer = await asyncio.open_connection(HOST, port)
    await reader.readexactly(len(MESSAGE))
    began = _cpu_s()
    while await reader.read(len(MESSAGE)):
        pass
    writer.close()
    return _cpu_s() - began


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
