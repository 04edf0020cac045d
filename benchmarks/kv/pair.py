"""Our contestants: P and D processes with real pools, one or several of each."""

import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any, Self

from benchmarks.kv.control import Child, python_child
from benchmarks.kv.shapes import Shape


class Ours:
    """Owner of the P and D processes of one measurement; a context manager."""

    def __init__(
        self, transport: str, shape: Shape, num_blocks: int, *, digest: bool = True, num_p: int = 1, num_d: int = 1,
        profile: bool = False, device: str = "cpu",
    ) -> None:  # fmt: skip
        """Start all, with pools on `device`. Raises RuntimeError with a child's error."""
        self.name = f"{transport}, digest {'on' if digest else 'off'}"
        self._shape = shape
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-"))
        sockets = [f"{folder}/d{i}" for i in range(num_d)]
        common = {
            "shape": shape.name, "num_blocks": num_blocks, "transport": transport, "digest": digest, "profile": profile,
            "device": device,
        }  # fmt: skip
        try:
            self.decodes = [
                self._start(
                    "receiver_process", {**common, "name": f"d{i}", "socket": socket, "core": self._core(i, num_d, 1)}
                )
                for i, socket in enumerate(sockets)
            ]
            # P i begins with D i, so that the prompts of all P spread over all D
            self.prefills = [
                self._start(
                    "sender_process",
                    {**common, "name": f"p{i}", "sockets": sockets[i:] + sockets[:i], "core": self._core(i, num_p, 0)},
                )
                for i in range(num_p)
            ]
        except BaseException:
            self._stack.close()
            raise

    @staticmethod
    def _core(number: int, of: int, half: int) -> int | None:
        """Return the core of the only P (`half` 0) or D (1), as `pdserve up` binds them; None if there are several."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[half] if of == 1 and number == 0 and len(cores) > 1 else None

    def move(self, num_bytes: int, *, verify: bool = False, chunk: int | None = None, scattered: bool = False) -> float:
        """Return the seconds of one hand-off of at least `num_bytes`, from the first put to the ack."""
        tokens = self._shape.tokens_of(num_bytes)
        if verify:
            self.decodes[0].ask(op="clear")
        took = self.hand(tokens=tokens, chunk=chunk or tokens, scattered=scattered)
        if verify:
            self.verify(tokens, scattered=scattered)
        return float(took["seconds"])

    def hand(self, **how: Any) -> dict[str, Any]:
        """Make hand-offs; arguments and result are those of sender_process.Prefill.hand."""
        return self.prefills[0].ask(op="hand", **how)

    def verify(self, tokens: int, *, scattered: bool = False, first: int = 0) -> None:
        """Raise RuntimeError unless D's blocks equal P's."""
        where = {"tokens": tokens, "scattered": scattered, "first": first}
        sent = self.prefills[0].ask(op="digest", **where)["digest"]
        here = self.decodes[0].ask(op="digest", **where)["digest"]
        if sent != here:
            raise RuntimeError(f"{self.name}: {tokens} tokens with digest {sent} arrived with digest {here}")

    def stream(self, tokens: int, chunk: int, window: int, seconds: float) -> float:
        """Let all P make hand-offs at once for `seconds`; return their bytes per second in total."""
        order = {"op": "stream", "tokens": tokens, "chunk": chunk, "window": window, "seconds": seconds}
        with ThreadPoolExecutor(len(self.prefills)) as pool:
            answers = list(pool.map(lambda prefill: prefill.ask(**order), self.prefills))
        hand_offs_s = sum(float(answer["hand_offs"]) / float(answer["seconds"]) for answer in answers)
        return hand_offs_s * tokens * self._shape.token_bytes

    @property
    def cpu_s(self) -> float:
        """CPU seconds that all processes have used together."""
        return sum(child.cpu_s for child in (*self.prefills, *self.decodes))

    def close(self) -> None:
        """End all processes, P first."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, module: str, config: dict[str, Any]) -> Child:
        child = python_child(module, json.dumps(config))
        self._stack.callback(child.close)
        return child


def medians_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median of every figure over several answers."""
    return {key: median(float(row[key]) for row in rows) for key in rows[0]}
