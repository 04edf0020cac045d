"""What `up` makes of a process that ends before the cluster is ready."""

import os
import sys
from pathlib import Path

import pytest

from pdserve.client import Client
from pdserve.layout import ProcessPlan
from pdserve.processes import Child
from pdserve.readiness import wait_ready
from wire.errors import ConfigError, PdserveError, Unavailable


@pytest.mark.parametrize(("status", "error"), [(2, ConfigError), (1, Unavailable), (0, Unavailable)])
def test_a_process_that_was_told_wrong_is_the_users_to_mend(
    status: int, error: type[PdserveError], tmp_path: Path
) -> None:
    code = f"import sys; print('its last words'); sys.exit({status})"
    child = Child(
        ProcessPlan("prefill-0", "prefill", "127.0.0.1:1", (sys.executable, "-c", code), {}),
        tmp_path / "log",
        os.environ,
    )

    with pytest.raises(error, match=f"prefill-0 ended with exit status {status}: its last words") as caught:
        wait_ready([child], Client("http://127.0.0.1:1"), 30.0, print)

    assert type(caught.value) is error
