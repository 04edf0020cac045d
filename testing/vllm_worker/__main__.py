"""Run a fake vLLM worker as a process: `python -m testing.vllm_worker --port 8101 [--settings JSON]`."""

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import replace

from testing.vllm_worker.settings import WorkerSettings, settings_from
from testing.vllm_worker.worker import FakeVllmWorker


def main() -> None:
    """Serve until SIGTERM or SIGINT; the first line printed is the URL."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--settings", default="{}", help="fields of WorkerSettings as JSON")
    args = parser.parse_args()
    asyncio.run(_serve(replace(settings_from(args.settings), port=args.port)))


async def _serve(settings: WorkerSettings) -> None:
    worker, stopped = FakeVllmWorker(settings, on_death=lambda: os.kill(os.getpid(), signal.SIGKILL)), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await worker.start()
    sys.stdout.write(f"{worker.url}\n")
    sys.stdout.flush()
    await stopped.wait()
    await worker.stop()


if __name__ == "__main__":
    main()
