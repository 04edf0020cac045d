"""An instance's metrics page describes each metric."""

import re
from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest

from instance.http import LoadCollector
from wire.load import LoadSnapshot


def test_every_metric_has_a_help_text() -> None:
    registry = CollectorRegistry()
    registry.register(LoadCollector(lambda: LoadSnapshot(blocks_total=8, blocks_used=3, running=1, progress_age_s=0.5)))

    page = generate_latest(registry).decode()

    assert "pdserve_instance_blocks_used 3.0" in page
    helps = [line.split(" ", 3)[3] for line in page.splitlines() if line.startswith("# HELP ")]
    numbers = {field.name for field in fields(LoadSnapshot) if field.type in (int, float)}
    assert set(re.findall(r"^pdserve_instance_(\w+) ", page, re.M)) == numbers
    assert len(helps) == len(numbers)
    assert "LoadSnapshot" not in page
    assert all(len(words.split()) > 2 for words in helps)
