"""`pdserve up`: start a cluster on this machine and supervise it, in the foreground or background."""

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
from pdserve.leftovers import end_leftovers
from pdserve.membership import TableMembership
from pdserve.model_flags import check_model
from pdserve.ports import require_free
from pdserve.processes import POLL_S, Watched, stop_children
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
_CLOSE_S = 5.0  # time for the scheduler to shut down after its last request


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 130 or 143 if Ctrl-C or SIGTERM came before the cluster was ready.

    Raises ConfigError for wrong input and Unavailable when a process is given up.
    """
    request = parse(argv)
    check_model(request.engine)
    check_kv_room(request.engine, request.options.prefill + request.options.decode, is_here=not request.options.ray)
    _export_secrets(request)
    folder = RunFolder(Path(request.options.run_dir or default_run_dir(os.environ)).absolute())
    require_none(folder)
    _end_leftovers(folder)
    for port in {request.engine.port, *request.scheduler_ports}:
        require_free(request.engine.host, port)  # before the folder is created
    interrupts = Interrupts()
    interrupts.take()
    try:
        with folder.lock():
            cluster = _Cluster(request, folder, interrupts)
            if not request.options.detach:
                return cluster.run(lambda: None)
            return in_background("pdserve up", cluster.run, folder.log("supervisor"))
    except KeyboardInterrupt:
        return interrupts.status
    finally:
        interrupts.ignore()


def _end_leftovers(folder: RunFolder) -> None:
    """End the processes that this folder's last cluster left when it was killed: they hold memory and ports."""
    state = folder.read()
    if state is not None and (left := end_leftovers(state.processes)):
        print(left, flush=True)


def _export_secrets(request: UpRequest) -> None:
    """Put the API keys, which no command line may show, and the certificate for our own client into the environment."""
    if request.api_keys:
        os.environ["PDSERVE_API_KEY"] = "\n".join(request.api_keys)
    if request.certfile is not None:
        os.environ["PDSERVE_CERT_FILE"] = request.certfile


class Interrupts:
    """Handles Ctrl-C and SIGTERM: the first raises KeyboardInterrupt; later ones make the shutdown immediate."""

    def __init__(self) -> None:
        self._count, self._raises, self._first = 0, True, int(signal.SIGINT)

    @property
    def status(self) -> int:
        """The exit status for an interrupted process: 128 plus the number of the first signal."""
        return 128 + self._first

    def take(self) -> None:
        """Install the handlers; for SIGHUP only if nohup has not set it to be ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self)

    def ignore(self) -> None:
        """Ignore signals once all is stopped: else one during the interpreter's exit could still be fatal."""
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
        """Delay interrupts until the end of the block, so that no started process is lost track of."""
        self._raises = False
        try:
            yield
        finally:
            self._raises = True
        if self._count:
            raise KeyboardInterrupt

    def hold(self) -> Callable[[], bool]:
        """Stop raising; return a function that returns whether another signal has come since."""
        self._raises, before = False, max(1, self._count)
        return lambda: self._count > before


def require_none(folder: RunFolder) -> None:
    """Raise ConfigError if a cluster runs or is starting in this folder."""
    state = folder.read()
    if state is None or not state.is_up:
        return
    if state.is_starting:
        where = f"a cluster is starting at {state.base_url}"
        raise ConfigError(f"{where}: `pdserve status` shows its progress, `pdserve down` stops it")
    raise ConfigError(f"a cluster already runs at {state.base_url}: `pdserve down` stops it")


class _Cluster:
    """One run of a cluster, in its supervisor process. Owns the state file in the run folder."""

    def __init__(self, request: UpRequest, folder: RunFolder, interrupts: Interrupts) -> None:
        self._request, self._folder, self._interrupts = request, folder, interrupts
        self._is_starting = True
        self._spare: ProcessRecord | None = None

    def run(self, leave: Callable[[], None]) -> int:
        """Start the cluster, call `leave` when it is ready, and supervise it until a signal; return the exit status.

        Raises Unavailable, ConfigError.
        """
        request, folder = self._request, self._folder
        folder.rename_old_logs()
        journal = SupervisorLog(folder.log("supervisor"))
        options = request.options
        limits = RestartLimits(max_restarts=options.max_restarts, window_s=options.restart_window)
        site = self._make_site(journal)
        supervisor = Supervisor(
            limits, site.spawn, journal.say, lambda records: self._write(records, journal), TableMembership().has,
            self._serves,
        )  # fmt: skip
        grace_s = _FAILED_GRACE_S
        try:
            folder.clear()
            self._write((), journal)  # `pdserve down` can stop it from now on, also while Ray has no room
            for plan in site.plans():
                with self._interrupts.later():
                    supervisor.start([plan])
            wait_ready(
                supervisor.children, list(map(Client, request.scheduler_urls)), request.startup_timeout_s,
                journal.say, request.running.urls,
            )  # fmt: skip
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
            journal.say(f"stopping; requests in progress have {given} to finish (a second signal stops them at once)")
            return 0
        finally:
            self._stop(site, supervisor.children, grace_s, journal)

    def _tick_site(self, site: Site, supervisor: Supervisor, journal: SupervisorLog) -> None:
        site.tick(time.monotonic(), is_calm=supervisor.is_calm)
        if site.spare != self._spare:
            self._spare = site.spare
            self._write(supervisor.records, journal)

    def _serves(self, record: ProcessRecord) -> bool:
        """Return whether a replaced process serves again.

        A scheduler is queried itself; for an instance, any scheduler is queried.
        """
        by_port = dict(zip(self._request.scheduler_ports, self._request.scheduler_urls, strict=True))
        url = by_port.get(int(record.address.rpartition(":")[2])) if record.role == "scheduler" else None
        return serves(Client(url or self._request.base_url, timeout_s=_PROBE_S), record)

    def _stop(self, site: Site, children: Sequence[Watched], grace_s: float, journal: SupervisorLog) -> None:
        at_once = self._interrupts.hold()
        site.close_port()
        for process in stop_children(children, grace_s, at_once):
            journal.say(f"{process.name} did not stop in time and was killed (log: {process.log})")
        try:
            for name in site.close(at_once):
                journal.say(f"{name} did not stop in time and was killed (log: {self._folder.log(name)})")
        finally:
            self._folder.clear()

    def _make_site(self, journal: SupervisorLog) -> Site:
        if not self._request.options.ray:
            return LocalSite(self._request, self._folder, journal.say)
        from pdserve.ray_site import RaySite

        return RaySite(self._request, self._folder, journal.say)

    def _write(self, processes: tuple[ProcessRecord, ...], journal: SupervisorLog) -> None:
        request, pid = self._request, os.getpid()
        log = str(self._folder.log("supervisor"))
        watcher = ProcessRecord("supervisor", "supervisor", pid, start_time(pid) or 0, "", log)
        try:
            self._folder.write(
                ClusterState(request.base_url, request.engine.model, processes, watcher, self._is_starting, self._spare)
            )
        except OSError as error:  # a full disk must not end a cluster that serves
            journal.say(f"the state file was not written, so `pdserve status` shows the previous state: {error}")
