"""The flags that only `pdserve up` has."""

from dataclasses import dataclass

from flags.options import flag
from pdserve.ray_cluster.need import STRATEGIES
from ranktable_tools.tables import WORKER_KINDS


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Flags that only `up` has; all others are passed to every process."""

    prefill: int = flag(1, "prefill instances", parse=int)
    decode: int = flag(1, "decode instances", parse=int)
    schedulers: int = flag(
        1, "scheduler processes; several share --port, and each also has its own port, from --port + 1 on "
        "(docs/operations.md)", parse=int,
    )  # fmt: skip
    prefill_workers: tuple[str, ...] = flag(
        (), "URLs of running vLLM workers for prefill, in addition to the instances (docs/route.md)", many=True
    )
    decode_workers: tuple[str, ...] = flag((), "URLs of running vLLM workers for decode", many=True)
    combined_workers: tuple[str, ...] = flag((), "URLs of running vLLM workers for both", many=True)
    detach: bool = flag(False, "return when the cluster is ready, and leave it serving")
    max_restarts: int = flag(5, "restarts of one process within --restart-window before giving up", parse=int)
    restart_window: float = flag(300.0, "seconds within which restarts of one process are counted", parse=float)
    spare: bool = flag(True, "keep one warm process that replaces an instance that died (docs/operations.md)")
    ray: bool = flag(False, "place the instances on the nodes of a Ray cluster (docs/ray.md)")
    address: str | None = flag(None, "with --ray: HOST:PORT of the cluster, or auto (default: a new one on this host)")
    ray_strategy: str = flag("spread", "with --ray: how instances are placed on nodes", choices=STRATEGIES)
    worker: str | None = flag(
        None, "start workers of this engine in place of pdserve's own instances (docs/launch.md)", choices=WORKER_KINDS
    )
    worker_args: str | None = flag(
        None, "with --worker: more flags of vllm serve, as one argument: '--enforce-eager -q awq'"
    )
    run_dir: str | None = flag(None, "folder of state and logs (default: $PDSERVE_RUN_DIR or ~/.local/state/pdserve)")
