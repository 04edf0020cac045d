"""`python -P -m pdserve.hub.fetching`: download one model in a separate process, isolating the hub library's imports.

stdin: DownloadJob as JSON; last line of stdout: Snapshot, or the error; stderr: progress
"""

import json
import os
import sys
from collections.abc import Callable, Mapping

from pdserve.hub import hugging_face, model_scope
from pdserve.hub.download_job import MODEL_SCOPE, DownloadJob, Snapshot
from pdserve.parent_death import die_with_parent
from wire.errors import PdserveError

Fetch = Callable[[DownloadJob, Mapping[str, str], Callable[[str], None]], Snapshot]


def main() -> int:
    """Download the model and print the result on stdout."""
    die_with_parent(os.environ)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our own lines show the progress
    job = DownloadJob.from_json(sys.stdin.readline())
    fetch: Fetch = model_scope.fetch if job.hub == MODEL_SCOPE else hugging_face.fetch
    try:
        answer = fetch(job, os.environ, _say).to_json()
    except PdserveError as error:
        answer = json.dumps({"refused": str(error)})
    except KeyboardInterrupt:
        return 130
    print(answer, flush=True)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
