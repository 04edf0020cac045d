"""`python -P -m pdserve.hub.fetching`: fetch one model in a process of its own, whatever its hub's library imports.

stdin: Asked as JSON; stdout's last line: Snapshot, or why not; stderr: what takes time, for who waits
"""

import json
import os
import sys
from collections.abc import Callable, Mapping

from pdserve.hub import hugging_face, model_scope
from pdserve.hub.download_job import MODEL_SCOPE, DownloadJob, Snapshot
from pdserve.tether import hold_on
from wire.errors import PdserveError

Fetch = Callable[[DownloadJob, Mapping[str, str], Callable[[str], None]], Snapshot]


def main() -> int:
    """Answer on stdout."""
    hold_on(os.environ)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our own lines say how far it is
    asked = DownloadJob.from_json(sys.stdin.readline())
    fetch: Fetch = model_scope.fetch if asked.hub == MODEL_SCOPE else hugging_face.fetch
    try:
        answer = fetch(asked, os.environ, _say).to_json()
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
