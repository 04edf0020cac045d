"""Which processes of `up` its table still lists."""

import json
from pathlib import Path

from pdserve.layout import ClusterShape, lay_out
from pdserve.membership import TableMembership
from pdserve.process_plan import ProcessPlan


def _without_the_first_decode(path: Path) -> str:
    document = json.loads(path.read_text())
    group = document["server_group_list"][2]
    del group["server_list"][0]
    group["server_count"] = str(len(group["server_list"]))
    return json.dumps(document)


def _names_in(membership: TableMembership, plans: tuple[ProcessPlan, ...]) -> list[str]:
    return [plan.name for plan in plans if membership.has(plan)]


def test_a_process_belongs_while_its_entry_exists(tmp_path: Path) -> None:
    plans = lay_out(ClusterShape(1, 2, "127.0.0.1", 9000, ()), tmp_path)
    path, membership = Path(plans[0].env["GLOBAL_RANK_TABLE_FILE_PATH"]), TableMembership()
    whole, names = path.read_text(), ["prefill-0", "decode-0", "decode-1", "scheduler"]
    assert _names_in(membership, plans) == names

    path.write_text(_without_the_first_decode(path))
    assert _names_in(membership, plans) == ["prefill-0", "decode-1", "scheduler"]
    path.write_text(whole[:100])
    assert _names_in(membership, plans) == ["prefill-0", "decode-1", "scheduler"]
    path.write_text(whole)
    assert _names_in(membership, plans) == names


def test_without_a_table_all_belong(tmp_path: Path) -> None:
    plans = lay_out(ClusterShape(1, 1, "127.0.0.1", 9000, ()), tmp_path)
    Path(plans[0].env["GLOBAL_RANK_TABLE_FILE_PATH"]).unlink()

    assert len(_names_in(TableMembership(), plans)) == 3


def test_a_process_without_a_table_belongs() -> None:
    assert TableMembership().has(ProcessPlan("x", "prefill", "127.0.0.1:1", (), {}))
