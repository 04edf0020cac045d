"""The servers that vLLM's tests start: `pdserve up` with a P and a D, or `pdserve serve`, with a model that is here."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anthropic
import httpx
import openai

from pdserve.ports import free_ports
from tests.vllm_server_tests.models import model_folder
from tests.vllm_server_tests.plugin_variables import LEFT_OUT, MODELS, RESULTS, WAY

WAYS = {
    "P/D": ("up", "--prefill=1", "--decode=1", "--no-spare"),
    "combined": ("serve",),
}
_ADAPTERS = {"--enable-lora": 0, "--lora-modules": 1, "--max-lora-rank": 1, "--max-cpu-loras": 1, "--max-loras": 1}
"""Flags that are left out, with the number of their values: pdserve refuses them, and most tests use none."""
_STORES = "VLLM_ENABLE_RESPONSES_API_STORE"
"""The variable for what a flag of pdserve enables."""
_KV, _IMAGES = "--kv-cache-memory=512MiB", "--allow-private-urls=127.0.0.0/8"
_START_S, _STOP_S, _GRACE_S, _POLL_S = 600.0, 120.0, 30.0, 0.1


class RemoteServer:
    """Owner of one server; what vLLM's tests call on theirs."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: Mapping[str, str] | None = None, seed: int = 0,
        auto_port: bool = True, max_wait_seconds: float | None = None, override_hf_configs: Any = None,
    ) -> None:  # fmt: skip
        assert override_hf_configs is None, "the config of a model is its folder's"
        flags = _without_adapters(vllm_serve_args)
        self.uds = _value(flags, "--uds")
        self.host, self.port = _value(flags, "--host") or "127.0.0.1", int(_value(flags, "--port") or 0)
        if auto_port and self.uds is None:
            (self.port,) = free_ports(1)
            flags += ["--port", str(self.port)]
        self.show_hidden_metrics = any(flag.startswith("--show-hidden-metrics") for flag in flags)
        self._folder = Path(tempfile.mkdtemp(prefix="server-"))
        self._log = self._folder / "log"
        self.proc = self._start(model, flags, env_dict or {})
        self._wait(max_wait_seconds or _START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.stop()

    def stop(self) -> None:
        """End the server; print the end of its log, which pytest shows where a test failed."""
        self.proc.terminate()
        try:
            self.proc.wait(_STOP_S)
        finally:
            self.proc.kill()
            print(self._log.read_text(errors="replace")[-4000:])
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url_root(self) -> str:
        """The server's URL."""
        return f"http://{self.host}:{self.port}" if self.uds is None else f"http://{Path(self.uds).name}"

    def url_for(self, *parts: str) -> str:
        """Return the URL of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **settings: Any) -> openai.OpenAI:
        """Return the official client."""
        return openai.OpenAI(base_url=self.url_for("v1"), **self._settings(settings))

    def get_async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        """Return the official client."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._settings(settings))

    def get_client_anthropic(self, **settings: Any) -> Any:
        """Return Anthropic's official client."""
        return anthropic.Anthropic(base_url=self.url_root, **self._settings(settings))

    def get_async_client_anthropic(self, **settings: Any) -> Any:
        """Return Anthropic's official client."""
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._settings(settings))

    def _get_process_termination_timeout(self) -> float:
        """Return how long a server may take to end, in seconds."""
        return _GRACE_S

    def _settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600.0, **settings}

    def _start(self, model: str, flags: Sequence[str], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        store = (f"--responses-store={self._folder / 'responses'}",) if _STORES in environ else ()
        ours = {LEFT_OUT, MODELS, RESULTS, WAY}
        names = () if "--served-model-name" in flags else ("--served-model-name", model)
        command = [
            sys.executable, "-P", "-m", "pdserve", *WAYS[os.environ[WAY]], "--model", str(model_folder(model)),
            *flags, *names, *store, _KV, _IMAGES,
        ]  # fmt: skip
        print(" ".join(command))
        with self._log.open("wb") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={
                    **{name: value for name, value in os.environ.items() if name not in ours}, **environ,
                    "PDSERVE_RUN_DIR": str(self._folder),
                },
            )  # fmt: skip

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if self.proc.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"the server did not start:\n{log}")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        transport = httpx.HTTPTransport(uds=self.uds)
        with httpx.Client(transport=transport, trust_env=False) as client:
            try:
                return client.get(self.url_for("ready"), timeout=5).status_code == 200
            except httpx.HTTPError:
                return False


def _without_adapters(flags: Sequence[str]) -> list[str]:
    kept, skipped = [], 0
    for flag in flags:
        if skipped:
            skipped -= 1
        elif flag in _ADAPTERS:
            skipped = _ADAPTERS[flag]
        else:
            kept.append(flag)
    return kept


def _value(flags: Sequence[str], name: str) -> str | None:
    return flags[flags.index(name) + 1] if name in flags else None
