"""Run a fake vLLM worker as a process: `python -m testing.vllm_worker [--settings JSON] [serve MODEL] [flags]`."""

import asyncio
import os
import signal
import sys
from functools import partial

from testing.vllm_worker.serve_flags import settings_of
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker


def main() -> None:
    """Serve until SIGTERM or SIGINT; the first line printed is the URL."""
    asyncio.run(_serve(settings_of(sys.argv[1:])))


async def _serve(settings: WorkerSettings) -> None:
    worker = FakeVllmWorker(settings, partial(_signal, signal.SIGKILL), partial(_signal, signal.SIGSTOP))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await worker.start()
    sys.stdout.write(f"{worker.url}\n")
    sys.stdout.flush()
    await stopped.wait()
    await worker.stop()


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
