"""`pdserve up`: start a cluster on this machine, keep its processes running, stay in front or in the background."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pdserve.background import in_background
from pdserve.client import Client
from pdserve.kv_memory_check import check_kv_room
from pdserve.membership import TableMembership
from pdserve.model_flags import check_model
from pdserve.ports import require_free
from pdserve.processes import POLL_S, Watched, stop
from pdserve.readiness import serves, wait_ready
from pdserve.restarts import RestartLimits
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, default_run_dir, start_time
from pdserve.site import LocalSite, Site
from pdserve.supervisor import Supervisor
from pdserve.supervisor_log import SupervisorLog
from pdserve.up_request import UpRequest, parse
from wire.errors import ConfigError

_FAILED_GRACE_S = 3.0
_PROBE_S = 0.5
_CLOSE_S = 5.0  # the scheduler's own, after its requests


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 130 or 143 where Ctrl-C or SIGTERM came before the cluster was ready.

    Raises ConfigError for what the user must mend and Unavailable when a process is given up.
    """
    request = parse(argv)
    check_model(request.engine)
    check_kv_room(request.engine, request.options.prefill + request.options.decode, is_here=not request.options.ray)
    _tell_children(request)
    folder = RunFolder(Path(request.options.run_dir or default_run_dir(os.environ)).absolute())
    interrupts = Interrupts()
    interrupts.take()
    try:
        require_none(folder)
        require_free(request.engine.host, request.engine.port)  # before the folder is made
        with folder.lock():
            cluster = _Cluster(request, folder, interrupts)
            if not request.options.detach:
                return cluster.run(lambda: None)
            return in_background("pdserve up", cluster.run, folder.log("supervisor"))
    except KeyboardInterrupt:
        return interrupts.status
    finally:
        interrupts.ignore()


def _tell_children(request: UpRequest) -> None:
    """Put into the environment what no command line may show, and the certificate that our own questions trust."""
    if request.api_keys:
        os.environ["PDSERVE_API_KEY"] = "\n".join(request.api_keys)
    if request.certfile is not None:
        os.environ["PDSERVE_CERT_FILE"] = request.certfile


class Interrupts:
    """Ctrl-C and SIGTERM: the first is raised, those after it, or while we stop, only make us stop at once."""

    def __init__(self) -> None:
        self._count, self._raises, self._first = 0, True, int(signal.SIGINT)

    @property
    def status(self) -> int:
        """The exit status of a process that ended because of them: 128 and the number of the first."""
        return 128 + self._first

    def take(self) -> None:
        """Hear of them from now on; of a terminal that goes only where nohup does not keep us from it."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self)

    def ignore(self) -> None:
        """Nothing is left to stop: without this the interpreter's own end has a moment in which one more is fatal."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            self._first = number
        if self._count == 1 and self._raises:
            raise KeyboardInterrupt

    @contextmanager
    def later(self) -> Iterator[None]:
        """Raise what comes meanwhile at the end of the block: within the start of a process nobody would know of it."""
        self._raises = False
        try:
            yield
        finally:
            self._raises = True
        if self._count:
            raise KeyboardInterrupt

    def hold(self) -> Callable[[], bool]:
        """Raise none any more; return what tells whether one came from here on."""
        self._raises, before = False, max(1, self._count)
        return lambda: self._count > before


def require_none(folder: RunFolder) -> None:
    """Raise ConfigError where a cluster runs in this folder, or starts there."""
    state = folder.read()
    if state is None or not state.is_up:
        return
    if state.is_starting:
        where = f"a cluster is starting at {state.base_url}"
        raise ConfigError(f"{where}: `pdserve status` shows how far, `pdserve down` stops it")
    raise ConfigError(f"a cluster already runs at {state.base_url}: `pdserve down` stops it")


class _Cluster:
    """One run of a cluster, in the process that supervises it. Owns what the run folder says of it."""

    def __init__(self, request: UpRequest, folder: RunFolder, interrupts: Interrupts) -> None:
        self._request, self._folder, self._interrupts = request, folder, interrupts
        self._is_starting = True
        self._spare: ProcessRecord | None = None

    def run(self, leave: Callable[[], None]) -> int:
        """Start it, call `leave` when it is ready, and supervise it until a signal; return the exit status.

        Raises Unavailable, ConfigError.
        """
        request, folder = self._request, self._folder
        folder.put_logs_aside()
        journal = SupervisorLog(folder.log("supervisor"))
        options = request.options
        limits = RestartLimits(most=options.max_restarts, window_s=options.restart_window)
        site = self._site(journal)
        probe = Client(request.base_url, timeout_s=_PROBE_S)
        supervisor = Supervisor(
            limits, site.spawn, journal.say, lambda records: self._write(records, journal), TableMembership().has,
            lambda record: serves(probe, record),
        )  # fmt: skip
        grace_s = _FAILED_GRACE_S
        try:
            folder.clear()
            self._write((), journal)  # `pdserve down` can end it from now on, while tables are made or Ray has no room
            for plan in site.plans():
                with self._interrupts.later():
                    supervisor.start([plan])
            wait_ready(supervisor.children, Client(request.base_url), request.startup_timeout_s, journal.say)
            self._is_starting = False
            self._write(tuple(child.record for child in supervisor.children), journal)
            journal.say(f"ready: {request.base_url}/v1 (logs: {folder.path / 'logs'})")
            grace_s = request.shutdown_timeout_s + _CLOSE_S
            leave()
            while True:
                with self._interrupts.later():
                    supervisor.tick(time.monotonic())
                    self._tick_site(site, supervisor, journal)
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            grace_s = request.shutdown_timeout_s + _CLOSE_S
            if self._is_starting:
                journal.say("stopping")
                return self._interrupts.status
            given = f"{request.shutdown_timeout_s:g} s"
            journal.say(f"stopping; requests under way have {given} (Ctrl-C or SIGTERM again: at once)")
            return 0
        finally:
            self._stop(site, supervisor.children, grace_s, journal)

    def _tick_site(self, site: Site, supervisor: Supervisor, journal: SupervisorLog) -> None:
        site.tick(time.monotonic(), is_calm=supervisor.is_calm)
        if site.spare != self._spare:
            self._spare = site.spare
            self._write(supervisor.records, journal)

    def _stop(self, site: Site, children: Sequence[Watched], grace_s: float, journal: SupervisorLog) -> None:
        at_once = self._interrupts.hold()
        records = [child.record for child in children]
        for process in stop([record for record in records if record.is_here], grace_s, at_once):
            journal.say(f"{process.name} did not stop in time and was killed (log: {process.log})")
        try:
            for name in site.close(at_once):
                journal.say(f"{name} did not stop in time and was killed (log: {self._folder.log(name)})")
        finally:
            self._folder.clear()

    def _site(self, journal: SupervisorLog) -> Site:
        if not self._request.options.ray:
            return LocalSite(self._request, self._folder, journal.say)
        from pdserve.ray_cluster.site import RaySite

        return RaySite(self._request, self._folder, journal.say)

    def _write(self, processes: tuple[ProcessRecord, ...], journal: SupervisorLog) -> None:
        request, pid = self._request, os.getpid()
        log = str(self._folder.log("supervisor"))
        watcher = ProcessRecord("supervisor", "supervisor", pid, start_time(pid) or 0, "", log)
        try:
            self._folder.write(
                ClusterState(request.base_url, request.engine.model, processes, watcher, self._is_starting, self._spare)
            )
        except OSError as error:  # a disk that fills up must not end a cluster that serves
            journal.say(f"the state is not written, `pdserve status` shows the one before: {error}")
