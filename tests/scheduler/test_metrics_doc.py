"""docs/metrics.md has every metric that the scheduler shows, and no other."""

import re
from pathlib import Path

from scheduler.metrics import Metrics
from scheduler.view import ClusterView, InstanceView, LedgerView
from wire.types import LinkStatus, LoadSnapshot, Role

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def _shown() -> set[tuple[str, str]]:
    """Return name and kind of all metrics of a scheduler with one instance and one link."""
    link = LinkStatus("d", "tcp", "up", 1, 1, 0, 0, 0.1, 1.0, ("shm: another host",))
    load = LoadSnapshot(1, 0, 0, 0, 0, 0, 0, 0, 0.0, links=(link,))
    instance = InstanceView(0, "prefill-0", Role.PREFILL, "p", "living", "", None, load)
    view = ClusterView(True, (instance,), LedgerView(0, 0, 0, 0, 0, 0, 0), 0, 0)
    text = Metrics(lambda: view).render().decode()
    families = re.findall(r"^# TYPE pdserve_(\w+) (\w+)$", text, re.M)
    named = ((name.removesuffix("_total") if kind == "counter" else name, kind) for name, kind in families)
    return {(name, kind) for name, kind in named if not name.endswith("_created")}


def test_the_page_is_what_the_scheduler_shows() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \| (gauge|counter|histogram) \|", PAGE.read_text(), re.M)
    written = [(name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names)]

    assert len(written) == len(set(written))
    assert set(written) == _shown()
