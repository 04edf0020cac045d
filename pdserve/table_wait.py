"""Wait at start for tables that their writer has not completed yet."""

import time
from collections.abc import Callable

from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan

_POLL_S = 1.0


def when_completed(
    resolve: Callable[[], LaunchPlan], timeout_s: float, say: Callable[[str], None], *,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> LaunchPlan:  # fmt: skip
    """Return the plan as soon as its tables have the status `completed`; say once what is awaited.

    Raises RanktableError at once for other errors, and after `timeout_s` if the tables are still not completed.
    """
    deadline, has_printed = clock() + timeout_s, False
    while True:
        try:
            return resolve()
        except RanktableError as error:
            if error.code != "not-completed":
                raise
            if clock() >= deadline:
                waited = f"{error} (waited {timeout_s:g} s, --startup-timeout)"
                raise RanktableError(waited, code=error.code, json_path=error.json_path, value=error.value) from error
            if not has_printed:
                say(f"waiting: {error}")
                has_printed = True
        sleep(min(_POLL_S, max(0.0, deadline - clock())))
