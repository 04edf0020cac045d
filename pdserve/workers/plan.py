"""Find out whether this process should be a worker of another engine, before anything heavy is imported."""

from collections.abc import Mapping, Sequence

from pdserve.table_wait import when_completed
from pdserve.workers.typed_flags import parse
from ranktable_tools.launch_plan import LaunchPlan, resolve
from ranktable_tools.worker_kind import VARIABLE, requested_worker
from wire.errors import ConfigError

_TABLE_TIMEOUT_S = 600.0


def plan_of_worker(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchPlan | None:
    """Return the plan of the worker to start, None in the scheduler's process; wait for tables not yet completed.

    Raises RanktableError, and ConfigError if the table lists an engine other than PDSERVE_WORKER.
    """
    share = "share-devices" in parse(argv).values
    plan = when_completed(
        lambda: resolve(environ, share_devices=share), _TABLE_TIMEOUT_S, lambda line: print(line, flush=True)
    )
    if plan.index is None:
        return None
    wanted, listed = requested_worker(environ), plan.own.worker
    if wanted != listed:
        where = f"{plan.global_table.instances[plan.index].json_path}.worker in {plan.global_path}"
        found, other = ("is missing", "") if listed is None else (f'is "{listed}"', f", or set {VARIABLE}={listed}")
        raise ConfigError(
            f"{VARIABLE} is {wanted}, but {where} {found}, so the scheduler expects another engine as {plan.name}: "
            f"write the tables with {VARIABLE}={wanted} set{other}"
        )
    return plan
