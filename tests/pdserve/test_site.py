"""What every process on this machine gets from the supervisor."""

import os
import sys
import time
from pathlib import Path

from engine.fused.area import NAME
from flags.options import EngineOptions
from pdserve.process_plan import ProcessPlan
from pdserve.run_folder import RunFolder
from pdserve.site import LocalSite
from pdserve.up_options import UpOptions
from pdserve.up_request import UpRequest

_DEADLINE_S = 300.0
_SAYS = """
import os
fd = os.environ.get("PDSERVE_WEIGHTS_FD")
print(os.readlink(f"/proc/self/fd/{fd}"), os.environ.get("PDSERVE_STATE_FILE"))
"""


def test_instances_share_a_memfd_and_the_scheduler_gets_the_state(tmp_path: Path) -> None:
    request = UpRequest(UpOptions(), EngineOptions(model="m"), 60.0, 30.0, ())
    site = LocalSite(request, RunFolder(tmp_path), print)
    output = {}
    for role in ("decode", "scheduler"):
        code = _SAYS if role == "decode" else 'import os; print(os.environ["PDSERVE_STATE_FILE"])'
        child = site.spawn(ProcessPlan(role, role, "x:1", (sys.executable, "-S", "-c", code), {}), False)
        deadline = time.monotonic() + _DEADLINE_S
        while child.ended() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        output[role] = Path(child.record.log).read_text().strip()
    site.close(lambda: False)

    assert output == {"decode": f"/memfd:{NAME} (deleted) None", "scheduler": str(tmp_path / "state.json")}
    assert not [one for one in Path("/proc/self/fd").iterdir() if NAME in _target(one)]


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""
