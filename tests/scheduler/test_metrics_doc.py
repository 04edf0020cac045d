"""docs/metrics.md has every metric that the scheduler exports, and no other."""

import re
from pathlib import Path

from scheduler.finished_requests import FinishedRequests
from scheduler.observability.metrics import Metrics
from scheduler.view import ClusterView, InstanceView
from tests.scheduler.fake_cluster import describe
from wire.load import LinkStatus, LoadSnapshot
from wire.types import Role

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def _shown() -> set[tuple[str, str]]:
    """Return name and kind of all metrics of a scheduler with one instance and one link."""
    link = LinkStatus("d", "tcp", "up", 1, 1, 0, 0, 0.1, 1.0, ("shm: another host",))
    load = LoadSnapshot(blocks_total=1, step_tokens=(0,) * 14, links=(link,))
    instance = InstanceView(0, "prefill-0", Role.PREFILL, "p", "living", "", describe(0, Role.PREFILL), load)
    view = ClusterView(True, (instance,), FinishedRequests(), 0, 0)
    text = Metrics(lambda: view).render().decode()
    families = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M)
    return {(_written(name, kind), kind) for name, kind in families if not name.startswith("process_")}


def _written(name: str, kind: str) -> str:
    """Return a name as the page writes it: without `pdserve_` and `_total`, except names with another prefix."""
    if not name.startswith(("pdserve_", "vllm:")):
        return name
    return name.removeprefix("pdserve_").removesuffix("_total" if kind == "counter" else "")


def test_the_page_lists_what_the_scheduler_exports() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \| (gauge|counter|histogram) \|", PAGE.read_text(), re.M)
    written = [(name, kind) for names, kind in rows for name in re.findall(r"`([\w:]+)`", names)]

    assert len(written) == len(set(written))
    assert set(written) == _shown()
