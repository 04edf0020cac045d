"""Fixtures and hooks of all tests: under `scripts/test --all` a test skipped for a missing tool is a failure."""

import functools
import gc
import importlib
import logging
import os
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest
from hypothesis import HealthCheck, settings

from native.build import build_all
from native.cache import NoNative
from pdserve import ports
from scheduler import loop
from tests.combinations import mark_second_loops_long, mark_the_rest_long, mark_the_unnamed_long
from tests.examples import num_examples

# A busy machine is not a defect. CI draws the same examples each time, so that a change is judged by its own effect;
# new ones are drawn on developers' machines and by `scripts/test --all`.
_IN_CI = bool(os.environ.get("CI")) and not os.environ.get("PDSERVE_TEST_ALL")
settings.register_profile(
    "no deadlines",
    max_examples=num_examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=_IN_CI,
)
settings.load_profile("no deadlines")

# Before torch is imported, and for processes that tests start: waiting threads leave the cores to other processes.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell's background job ignores SIGINT, and so would all processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = ("tests/conformance/", "tests/clients/", "tests/cluster/")
"""Folders whose files share clusters; each folder runs on one worker."""
APART = "tests/vllm_server_tests/test_vllm_files.py"
"""Each test of it runs a file, in processes of its own, on any worker."""
MISSING = "missing tool"
"""Begin a skip's reason with this where the test would run if something were installed."""


@pytest.fixture(scope="session", autouse=True)
def short_collections() -> Iterator[None]:
    """Keep frozen all that is imported, also at the end of a loop: the next collection would walk it for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "gc", SimpleNamespace(**vars(gc) | {"unfreeze": lambda: None}))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust one authority of certifi's file: each HTTP client reads all that are in it, for longer than most tests."""
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_rehearsal_of_a_config() -> Iterator[None]:
    """Rehearse each config once: for a tiny model it takes longer than the rest of a load.

    Models that differ only in how their weights are stored have one network. A refused one is rehearsed again: its
    message names the folder.
    """
    if "engine.loader" not in sys.modules:
        yield
        return
    loader, found = importlib.import_module("engine.loader"), dict[tuple[str, str], Any]()
    rehearse = loader.rehearse

    def rehearse_once(checkpoint: Any, dtype: str) -> Any:
        config = {name: value for name, value in checkpoint.config.to_dict().items() if name != "quantization_config"}
        key = f"{type(checkpoint.config)} {config}", dtype
        if key not in found:
            found[key] = rehearse(checkpoint, dtype)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "rehearse", rehearse_once)
        yield


@pytest.fixture(scope="session")
def native_libraries() -> None:
    """For tests of native code: build what `scripts/install` left out, and skip where no compiler makes it."""
    try:
        build_all()
    except NoNative as error:
        pytest.skip(f"{MISSING}: no native functions here: {error}")


@pytest.fixture(scope="session", autouse=True)
def ports_of_its_own() -> Iterator[None]:
    """Give each worker its share of the ports above the ephemeral ones; `pdserve up` itself searches below them.

    A port is probed first and listened on seconds later, or again after its process was killed: meanwhile nothing else
    of this run may find it.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = range(61_000, 65_536)[_worker() :: count]
    with pytest.MonkeyPatch.context() as patch:
        chosen = functools.wraps(ports._ports_not_ephemeral)(lambda: own)
        patch.setattr(ports, "_ports_not_ephemeral", chosen)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, run files that share clusters on one worker, and files in the order of the items."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    scheduling = importlib.import_module("xdist.scheduler").LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    # Under --all these folders are most of their parts, each with both workers.
    together = SHARED[:1] if os.environ.get("PDSERVE_TEST_ALL") else SHARED

    def scope_of(nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        folder = _shared(nodeid)
        return folder if folder in together and folder is not None else str(file_of(nodeid))

    scheduling._split_scope = scope_of
    return scheduling


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, a quarter of the time: nearly all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Begin at the other end in every second worker: what one of two has compiled, the other only reads."""
    report = yield
    if isinstance(collector, pytest.Directory) and _worker() % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort, the same in each worker, and mark, before `-m "not long"` selects."""
    items.sort(key=_place_in_order)
    mark_the_unnamed_long(items)
    mark_the_rest_long(items)
    mark_second_loops_long(items)


def _place_in_order(item: pytest.Item) -> tuple[bool, int, Path]:
    """Order folders that are one unit of work first, then files by chance: some wait while others compute."""
    return not item.nodeid.startswith(SHARED), zlib.crc32(item.nodeid.split("::")[0].encode()), item.path


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Collect once and freeze the rest: pytest and the interpreter would walk it at each step of their end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Undo what a test may have left; a fixture for each test would take longer than many tests.

    A command that ran in this process changed logging, and the next test may capture what it turned off. More threads
    of torch mostly wait for each other over small matrices.
    """
    log = logging.getLogger("pdserve")
    log.handlers[:], log.propagate = [], True
    log.setLevel(logging.NOTSET)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """End what the session has started with the last test of such a folder: clusters would idle to the end of a run."""
    done = yield
    if _shared(item.nodeid) not in (None, _shared(nextitem.nodeid) if nextitem is not None else None):
        item.session._setupstate.teardown_exact(None)
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn such a skip into a failure."""
    report = yield
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    if os.environ.get("PDSERVE_TEST_ALL") and report.skipped and MISSING in reason:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason}"
    return report


def _shared(nodeid: str) -> str | None:
    """Return the folder of SHARED that the test is in."""
    return next((folder for folder in SHARED if nodeid.startswith(folder)), None)


def _worker() -> int:
    """Return the number of this process among xdist's workers."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
