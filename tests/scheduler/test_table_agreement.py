"""Instances whose table differs from the scheduler's."""

import re

import pytest

from scheduler.observability.metrics import Metrics
from scheduler.table_agreement import AGREE_S, TableAgreement
from tests.scheduler.fake_cluster import TABLE_DIGEST, FakeCluster
from tests.scheduler.virtual_time import until, virtual
from tests.scheduler.worker_cluster import WorkerCluster
from wire.messages import TableRead

NEW = "7ab1e2"


class Looking:
    """A cluster, and a check of the agreement at chosen times."""

    def __init__(self, cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
        self.cluster, self._agreement, self._caplog = cluster, TableAgreement(), caplog
        caplog.set_level("INFO", "pdserve.table")

    def at(self, now: float) -> list[str]:
        """Check and return what is logged."""
        self._caplog.clear()
        registry = self.cluster.control.registry
        self._agreement.compare(registry.living(), registry.table.digest, now)
        return self._caplog.messages

    async def report_table(self, index: int, digest: str) -> None:
        """Let an instance report another table."""
        (session,) = self.cluster.instances[index].sessions
        session.emit(TableRead(digest))
        living = self.cluster.control.registry.instance(index)
        await until(lambda: living.table_digest == digest)

    def agree(self) -> list[str]:
        """The values of the gauge, in the table's order."""
        page = Metrics(self.cluster.control.view).render().decode()
        return re.findall(r"^pdserve_table_agrees\{.*\} (\S+)$", page, re.M)


@virtual
async def test_tables_that_differ_for_long_are_a_warning_until_they_agree(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster("PD").serving() as cluster:
        looking = Looking(cluster, caplog)
        assert looking.agree() == ["1.0", "1.0"]
        cluster.control.registry.change(cluster.expected, NEW)

        assert looking.at(0.0) == []
        await looking.report_table(0, NEW)
        (warning,) = looking.at(AGREE_S)
        assert warning.startswith("table_differs instance=decode-0 ")
        assert f"there={TABLE_DIGEST} here={NEW}" in warning
        assert looking.at(AGREE_S + 1) == []
        assert looking.agree() == ["1.0", "0.0"]
        await looking.report_table(1, NEW)
        assert looking.at(AGREE_S + 2) == [f"table_agrees instance=decode-0 digest={NEW}"]


@virtual
async def test_tables_that_agree_in_time_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster("PD").serving() as cluster:
        looking = Looking(cluster, caplog)
        await looking.report_table(0, NEW)  # it reached an instance first

        assert looking.at(0.0) == []
        await looking.report_table(1, NEW)
        cluster.control.registry.change(cluster.expected, NEW)
        assert looking.at(AGREE_S) == []


@virtual
async def test_a_restarted_instance_has_its_full_time_again(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster("PD").serving() as cluster:
        looking = Looking(cluster, caplog)
        cluster.control.registry.change(cluster.expected, NEW)
        await looking.report_table(0, NEW)
        looking.at(0.0)
        cluster.kill(1)
        await until(lambda: cluster.control.registry.missing())
        cluster.boot(1, epoch=99)
        await until(lambda: not cluster.control.registry.missing())

        assert looking.at(AGREE_S) == []
        assert len(looking.at(2 * AGREE_S)) == 1


@pytest.mark.anyio
async def test_workers_of_another_engine_have_no_table_to_agree_on(caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerCluster("PD").serving() as cluster:
        agreement, registry = TableAgreement(), cluster.control.registry
        for now in (0.0, AGREE_S):
            agreement.compare(registry.living(), NEW, now)

        assert len(registry.living()) == 2
        assert not [line for line in caplog.messages if line.startswith("table_differs")]
        assert cluster.control.view().table_agrees == {}
