"""Run a job in its own process, to be killed: python -m tests.batch.killed_run FOLDER [MAX_FILE_BYTES]."""

import asyncio
import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from batch.backend import NO_HEADERS, Answer
from batch.job import BatchJob, BatchStopped
from batch.prepared_job import prepare
from batch.runner import BatchProgress, run_batch


class Echo:
    """Answers each body with itself, each after its own number of loop turns; `n` divisible by 10 is refused."""

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        """Answer."""
        requested = json.loads(body)
        for _ in range(requested["n"] * 7919 % 5):
            await asyncio.sleep(0)
        if requested["n"] % 10 == 0:
            error = {"message": "refused", "type": "invalid_request_error", "param": None, "code": 400}
            return Answer(400, {}, json.dumps({"error": error}).encode())
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        return Answer(200, {}, json.dumps({"echo": requested, "usage": usage}).encode())


def job_in(folder: Path) -> BatchJob:
    """Return the job of a folder."""
    return BatchJob(folder / "in.jsonl", folder / "out.jsonl", folder / "err.jsonl", {"model": "m"}, max_inflight=4)


def run(folder: Path) -> BatchProgress:
    """Run the job of a folder."""
    with prepare(job_in(folder)) as prepared:
        return asyncio.run(run_batch(prepared, Echo(), on_progress=lambda progress: None))


def main() -> None:
    """Run it; a run that was stopped prints the reason and ends with status 1."""
    if len(sys.argv) > 2:
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        progress = run(Path(sys.argv[1]))
    except BatchStopped as stopped:
        print(stopped)
        sys.exit(1)
    print(f"resumed {progress.resumed}, peak {_peak_kib()} KiB")


def _peak_kib() -> int:
    """Return this program's peak memory; getrusage would count that of its parent."""
    (reported,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(reported.split()[1])


if __name__ == "__main__":
    main()
