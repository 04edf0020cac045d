"""`python -P -m pdserve.spare_process FLAGS`: import what an instance needs, then wait to become one.

Where several schedulers share a port, it imports what they need too, and may become one of them.

    warm up at low priority -> "warm" -> the command line on stdin -> pdserve.launch in this very process

FLAGS are those of the cluster's processes: engine and model decide what to import. The process reads one JSON
object {"name", "argv", "env", "log"} from stdin, and exits on an EOF before it. It opens no device. Like every process
of the cluster it starts in the supervisor's working directory and on its cores.
"""

import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from flags.options import EngineOptions, from_namespace
from pdserve import launch
from pdserve.guarded import leave
from pdserve.parent_death import die_with_parent
from pdserve.run_folder import open_log
from scheduler.http.listener import SHARED_VARIABLE, take_shared
from telemetry.start_marks import VARIABLE, WARM, StartMarks

MAX_BYTES = 1 << 20  # a command line with its environment: the largest pipe without privileges
_NICE = 19
_FIRST_VICTIM = "1000"
_DEVICES = ("/dev/nvidia", "/dev/davinci", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dri", "/dev/kfd")


def main(flags: Sequence[str]) -> int:
    """Warm up, wait, and run the process that died; return the exit status, 0 if the spare was not used."""
    die_with_parent(os.environ)
    marks = StartMarks.take(os.environ)
    shared = take_shared(os.environ)
    score = _be_first_victim()
    _at_low_priority(flags, may_schedule=shared is not None)
    held = sorted(path for path in _open_files() if path.startswith(_DEVICES))
    if held:
        print(f"a spare must not open a device, but this one has {', '.join(held)} open", file=sys.stderr)
        return 1
    marks.set(WARM)
    order = _read_order()
    if not order:
        return 0
    argv = _take_over(json.loads(order), score, marks)
    if shared is not None:
        _keep_or_close(shared)
    return launch.main(argv)


def _be_first_victim() -> str:
    """Make this process the OOM killer's first choice; return its previous score."""
    path = Path("/proc/self/oom_score_adj")
    try:
        before = path.read_text()
        path.write_text(_FIRST_VICTIM)
    except OSError:
        return ""
    return before


def _at_low_priority(flags: Sequence[str], *, may_schedule: bool) -> None:
    """Import in a thread of the lowest CPU priority; the main thread and its later threads keep the normal one."""
    failed: list[BaseException] = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            _import_modules(flags, may_schedule=may_schedule)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            failed.append(error)

    thread = threading.Thread(target=work, name="warm-up")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    gc.collect()
    gc.freeze()


def _import_modules(flags: Sequence[str], *, may_schedule: bool) -> None:
    from instance.warm_up import import_all
    from pdserve import instance_flags, role_process  # noqa: F401 - needed to serve, besides the engine

    if may_schedule:
        import scheduler.process  # noqa: F401
    import_all(from_namespace(EngineOptions, launch.read_flags(flags, os.environ)))


def _keep_or_close(shared: socket.socket) -> None:
    """Keep the schedulers' shared port open if this process becomes a scheduler, else close it."""
    if SHARED_VARIABLE in os.environ:
        shared.detach()
    else:
        shared.close()


def _open_files() -> list[str]:
    """Return the paths of this process's open files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def _read_order() -> bytes:
    """Read stdin until EOF. Raises ValueError above MAX_BYTES."""
    data = bytearray()
    while part := os.read(0, 65_536):
        data += part
        if len(data) > MAX_BYTES:
            raise ValueError(f"the command line has more than {MAX_BYTES} bytes")
    return bytes(data)


def _take_over(order: dict[str, object], score: str, marks: StartMarks) -> list[str]:
    """Become the process that the received JSON describes; return its command line."""
    env, argv = order["env"], order["argv"]
    assert isinstance(env, dict)
    assert isinstance(argv, list)
    if score:
        Path("/proc/self/oom_score_adj").write_text(score)
    with open(os.devnull, "rb") as nothing, open_log(Path(str(order["log"]))) as log:
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)
    os.environ.clear()
    os.environ.update(env)
    if marks.descriptor is not None:
        os.environ[VARIABLE] = str(marks.descriptor)
    Path("/proc/self/comm").write_text(str(order["name"]))  # the name that `ps` shows
    sys.argv[1:] = argv
    return argv


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
