"""Fake prefill and decode workers with vLLM's HTTP API, behind `vllm-router` or `pdserve route`; they replay tokens.

    python benchmarks/front_door/http_workers.py     prints {"ready": true, "prefill": PORT, "decode": PORT}

Each answers /v1/completions and /v1/chat/completions with the same tokens for every prompt, one event per token; only
the length and the fields of an answer depend on the request. The first token is sent at once, and the others of all
streams together at the next multiples of `step_s` of the monotonic clock, so that a client on this machine knows when
each was sent. The prefill worker's answer has the transfer fields that a router copies into the decode request.
"""

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scheduler.loop import new_loop

HOST = "127.0.0.1"
TRANSFER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [[1, 2, 3, 4]],
    "remote_host": HOST, "remote_port": 5600, "tp_size": 1, "remote_request_id": "r",
}  # fmt: skip
MODEL = "fake"
_TIMER_S = 0.001
"""The resolution of a timer: no step may be early."""
_FIRST_ID, _NUM_IDS = 1000, 256
_HEAD = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1, "model": MODEL}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Stream:
    """One streamed answer: only its length and the fields of its events depend on the request."""

    def __init__(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.left = int(body.get("max_tokens") or 1)
        self.ended = asyncio.get_running_loop().create_future()
        self._writer, self._body = writer, body
        self._events = _PLAIN if body.get("logprobs") is None else _SCORED
        self._at = 0
        writer.write(_STREAM_HEAD)

    def step(self) -> None:
        """Send the next token; after the last one, the end."""
        if self._writer.is_closing():
            self._end()
            return
        self.left -= 1
        if self.left:
            self._writer.write(self._events[self._at % _NUM_IDS])
            self._at += 1
            return
        prompt_tokens = len(self._body.get("prompt", ()))
        last = _event(_choice(self._at, self._body.get("logprobs") is not None, "length"))
        if (self._body.get("stream_options") or {}).get("include_usage"):
            last += _event([], usage=_usage(prompt_tokens, self._at + 1))
        self._writer.write(last + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self._end()

    def _end(self) -> None:
        self.left = 0
        if not self.ended.done():
            self.ended.set_result(None)


class Worker:
    """Answers on one port; `step_s` is the time of one token."""

    def __init__(self) -> None:
        self.step_s = 0.01
        self._streams: list[Stream] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._num_tokens = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _content_length(head)
                body = json.loads(await reader.readexactly(length)) if length else {}
                path = head.split(b" ", 2)[1]
                if path.endswith(b"completions"):
                    await self._answer_completion(writer, body)
                elif path == b"/metrics":
                    _whole(writer, self._metrics(), b"text/plain")
                else:
                    card = {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 8192}
                    _send_whole(writer, {"object": "list", "data": [card], "status": "ok", "version": "0.32.0"})
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer_completion(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        count = int(body.get("max_tokens") or 1)
        self._num_tokens += count
        if body.get("stream"):
            stream = Stream(writer, body)
            stream.step()
            if stream.left:
                self._streams.append(stream)
                self._plan()
            await stream.ended
            return
        await asyncio.sleep(self.step_s * (count - 1))
        choice = {"index": 0, "text": " word" * count, "logprobs": None, "finish_reason": "length"}
        usage = _usage(len(body.get("prompt", ())), count)
        _send_whole(writer, {**_HEAD, "choices": [choice], "usage": usage, "kv_transfer_params": TRANSFER})

    def _plan(self) -> None:
        """Set the timer of the next step, which all streams share; a late step is made up for."""
        if self._timer is None:
            self._due_s = self.step_s * math.floor(time.monotonic() / self.step_s + 1)
            self._set_timer()

    def _set_timer(self) -> None:
        delay_s = self._due_s - time.monotonic() + _TIMER_S
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._step)

    def _step(self) -> None:
        for stream in self._streams:
            stream.step()
        self._streams = [stream for stream in self._streams if stream.left]
        self._timer = None
        if self._streams:
            self._due_s += self.step_s
            self._set_timer()

    def _metrics(self) -> bytes:
        values = {"num_requests_running": len(self._streams), "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0}
        values |= {"generation_tokens_total": self._num_tokens, "prompt_tokens_total": 0}
        lines = [f'vllm:{name}{{engine="0"}} {value}' for name, value in values.items()]
        return "\n".join([*lines, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1048576"} 1.0\n']).encode()


def _choice(at: int, has_logprobs: bool, finish: str | None = None) -> list[dict[str, Any]]:
    name = f"token_id:{_FIRST_ID + at % _NUM_IDS}"
    logprobs = {"text_offset": [0], "token_logprobs": [-0.5], "tokens": [name], "top_logprobs": [{name: -0.5}]}
    choice: dict[str, Any] = {"index": 0, "text": " word", "logprobs": logprobs if has_logprobs else None}
    choice |= {"finish_reason": finish, "stop_reason": None, "token_ids": [_FIRST_ID + at % _NUM_IDS]}
    return [{**choice, "prompt_token_ids": None}]


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    event = b"data: %s\n\n" % json.dumps({**_HEAD, "choices": choices, **more}, separators=(",", ":")).encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


_PLAIN = [_event(_choice(at, has_logprobs=False)) for at in range(_NUM_IDS)]
_SCORED = [_event(_choice(at, has_logprobs=True)) for at in range(_NUM_IDS)]


def _send_whole(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    _whole(writer, json.dumps(body).encode(), b"application/json")


def _whole(writer: asyncio.StreamWriter, content: bytes, content_type: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (content_type, len(content)))
    writer.write(content)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def serve() -> None:
    """Serve both until standard input ends."""
    workers, ports = (Worker(), Worker()), {}
    for name, worker in zip(("prefill", "decode"), workers, strict=True):
        server = await asyncio.start_server(worker.answer, HOST, 0, backlog=2048)
        ports[name] = server.sockets[0].getsockname()[1]
    print(json.dumps({"ready": True, **ports}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        for worker in workers:
            worker.step_s = max(_TIMER_S, json.loads(line).get("step_s", worker.step_s))
        print(json.dumps({"ok": True}), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())
