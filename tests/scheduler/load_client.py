"""Many kept-alive connections at once that send one completion after another and count the outcomes."""

import asyncio
import json
from collections import Counter

ANSWER_S = 300.0


async def status_of(host: str, port: int, path: str) -> int:
    """Return the status of one GET, 0 where nothing listens."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return 0
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def request_all(
    port: int, *, num_requests: int, num_connections: int, body: dict[str, object], key: str = ""
) -> Counter[str]:
    """Send the requests over that many connections, every other one streamed; return the counts of outcomes.

    An outcome is the status, or `cut` for a stream without [DONE]. `key` is sent with each request.
    """
    endings: Counter[str] = Counter()
    left = iter(range(num_requests))

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for number in left:
                writer.write(_request(body | {"stream": number % 2 == 0, "seed": number}, key))
                async with asyncio.timeout(ANSWER_S):
                    endings[await _outcome(reader)] += 1
        finally:
            writer.close()
            await writer.wait_closed()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_connections):
            tasks.create_task(work())
    return endings


def _request(body: dict[str, object], key: str) -> bytes:
    content = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}", *([f"Authorization: Bearer {key}"] if key else []), "", ""]
    return "\r\n".join(lines).encode() + content


async def _outcome(reader: asyncio.StreamReader) -> str:
    """Read one answer to its end; every 429 has to have a Retry-After."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = head.split(b" ", 2)[1].decode()
    if status == "429":
        assert b"\r\nretry-after: " in head
    if b"\r\ntransfer-encoding: chunked" in head:
        content = await _chunks(reader)
        return status if content.endswith(b"data: [DONE]\n\n") else "cut"
    length = int(head.split(b"\r\ncontent-length: ", 1)[1].split(b"\r\n", 1)[0])
    answer = json.loads(await reader.readexactly(length))
    assert ("choices" in answer) == (status == "200")
    return status


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return content
