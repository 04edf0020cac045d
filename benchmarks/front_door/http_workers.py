"""Fake prefill and decode workers with vLLM's HTTP API, to be placed behind `vllm-router`; they only count tokens.

    python benchmarks/front_door/http_workers.py     prints {"ready": true, "prefill": PORT, "decode": PORT}

Each answers /v1/completions and /v1/chat/completions with one event per token, one step apart; only `max_tokens` is
used. The prefill worker's answer has the transfer fields that a router copies to decode.
"""

import asyncio
import json
import sys
from typing import Any

HOST = "127.0.0.1"
TRANSFER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [[1, 2, 3, 4]],
    "remote_host": HOST, "remote_port": 5600, "tp_size": 1, "remote_request_id": "r",
}  # fmt: skip


class Worker:
    """Answers on one port; `step_s` is the time of one token."""

    def __init__(self) -> None:
        self.step_s = 0.01

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _length(head)
                body = json.loads(await reader.readexactly(length)) if length else {}
                path = head.split(b" ", 2)[1]
                if path.endswith(b"completions"):
                    await self._complete(writer, body)
                else:
                    _unary(writer, {"object": "list", "data": [{"id": "fake", "object": "model"}], "status": "ok"})
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        count = int(body.get("max_tokens") or 1)
        if not body.get("stream"):
            await asyncio.sleep(self.step_s * count)
            choice = {"index": 0, "text": " word" * count, "logprobs": None, "finish_reason": "length"}
            usage = {"prompt_tokens": 64, "total_tokens": 64 + count, "completion_tokens": count}
            answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "fake", "choices": [choice]}
            _unary(writer, {**answer, "usage": usage, "kv_transfer_params": TRANSFER})
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        event = (
            b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"fake","choices":'
            b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        )
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        for _ in range(count):
            await asyncio.sleep(self.step_s)
            writer.write(chunk)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _unary(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content))
    writer.write(content)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def serve() -> None:
    """Serve both until standard input ends."""
    workers, ports = (Worker(), Worker()), {}
    for name, worker in zip(("prefill", "decode"), workers, strict=True):
        server = await asyncio.start_server(worker.answer, HOST, 0, backlog=1024)
        ports[name] = server.sockets[0].getsockname()[1]
    print(json.dumps({"ready": True, **ports}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        for worker in workers:
            worker.step_s = json.loads(line).get("step_s", worker.step_s)
        print(json.dumps({"ok": True}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve())
