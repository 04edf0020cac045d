"""A `docker` that stands in for the engine: it lists the containers it is given, and records its calls."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCRIPT = """#!/bin/sh
here=$(dirname -- "$0")
for word in "$@"; do printf '%s\\0' "$word" >> "$here/words"; done
printf '\\001' >> "$here/words"
case "$1" in
    ps) cat "$here/ids" ;;
    inspect) cat "$here/inspect.json"; exit "$(cat "$here/status")" ;;
    run) cat "$here/run.out"; exit "$(cat "$here/status")" ;;
    build) cat > "$here/stdin" ;;
esac
"""


class StubDocker:
    """Owner of the folder that goes into PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "docker").write_text(_SCRIPT)
        (folder / "docker").chmod(0o700)
        self.answers_run("", 0)
        self.runs()

    def runs(self, *containers: dict[str, Any], status: int = 0) -> None:
        """Set the running containers, as `docker inspect` reports them."""
        (self.folder / "ids").write_text("".join(f"{index:064d}\n" for index in range(len(containers))))
        (self.folder / "inspect.json").write_text(json.dumps(list(containers)))
        (self.folder / "status").write_text(str(status))

    def answers_run(self, text: str, status: int) -> None:
        """Let `docker run` print this and end with this status."""
        (self.folder / "run.out").write_text(text)
        (self.folder / "status").write_text(str(status))

    def calls_of(self, command: str) -> list[list[str]]:
        """Return the argument lists of one of its commands, in order."""
        file = self.folder / "words"
        calls = file.read_text().split("\1")[:-1] if file.exists() else []
        return [words for call in calls if (words := call.split("\0")[:-1])[0] == command]


def container(name: str, *, npus: Sequence[int] = (), env: Sequence[str] = (), **host: Any) -> dict[str, Any]:
    """Return a container as `docker inspect` reports it; `labels` among the rest are its labels."""
    labels = host.pop("labels", {})
    devices = [
        {"PathOnHost": f"/dev/davinci{npu}", "PathInContainer": f"/dev/davinci{npu}", "CgroupPermissions": "rwm"}
        for npu in npus
    ]
    return {
        "Id": "0" * 64,
        "Name": f"/{name}",
        "HostConfig": {"Devices": devices or None, "DeviceRequests": None, **host},
        "Config": {"Env": list(env), "Labels": labels},
    }
