"""Two connections to an instance in this process: gRPC over a socket, and direct calls. Tests of both take `Reach`."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from rpc.grpc_connection import GrpcConnection
from rpc.grpc_server import GrpcServer
from wire.connection import Connection, InstanceService
from wire.inprocess import InProcessConnection

Reach = Callable[[InstanceService], AbstractAsyncContextManager[Connection]]


@contextlib.asynccontextmanager
async def over_grpc(instance: InstanceService) -> AsyncIterator[Connection]:
    """Serve it on loopback and connect."""
    server = GrpcServer("127.0.0.1", 0)
    port = await server.start()
    await server.serve(instance)
    connection = GrpcConnection(f"127.0.0.1:{port}")
    try:
        yield connection
    finally:
        await connection.close()
        await server.stop(0)


@contextlib.asynccontextmanager
async def in_process(instance: InstanceService) -> AsyncIterator[Connection]:
    """Call it directly."""
    yield InProcessConnection(instance)
