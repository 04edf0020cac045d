"""The limits of the control plane: every timeout of registry, instances, admission, dispatch and probe."""

from dataclasses import dataclass

from native.ticker import starved_s
from scheduler.starvation import Starved
from wire.types import Role


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Seconds unless noted, counting only time in which the waiting process could run (`starved` returns the rest).

    A dead instance is detected when its stream breaks. One that is silent for `suspect_s` gets no new work, and is
    lost after `silence_s`; both are extended by the instance's own starvation, up to `silence_most_s`. One whose engine
    is stuck is lost when its last progress is older than `progress_s`, or older than its slow turns explain
    (wire/shared_limits.py). Without starvation or slow turns a silent instance and a stuck engine are detected
    within 10 s, a heartbeat's delay included. A session gets a quick reconnect once it has lasted `lived_s`. A refused
    instance is tried again after `refused_first_s`, then after twice as long, up to `refused_retry_s`.

    Concurrent retries are limited to `retry_share` of the active requests, but at least `min_retries`; each counts for
    at most `retry_window_s`. A reservation takes `reserve_s` at most, plus `grammar_s` if a grammar is compiled for it,
    which may wait behind others (engine/grammar/limits.py: wait_s and compile_s). Once a reservation has taken
    `unassign_after_s`, other prompts may use the prefill instance's next step. An instance that left the table has
    `drain_s` for its prompts; those left then continue elsewhere. Tables that differ at the start are an error after
    `tables_s`: a changed file does not reach all hosts at once. If a new table leaves no path, requests wait `join_s`
    for the instances that it adds.

    `num_tenants` is how many API keys share the queue (queue/room.py); 1 if there is none. While no instance of a role
    in `may_lack` is living, those of the other role serve prompts alone. `compare_paths`: a prompt may also stay on one
    instance, where that costs less than a hand-off (placement.py). `follow_load`: roles change with the load
    (role_policy.py). A request whose first token is expected after `ttft_limit_s` is refused; 0: no limit. Streams run
    on for `orphan_s` after their session is lost.
    """

    max_queued_requests: int = 1000
    max_queued_tokens: int = 4_000_000
    num_tenants: int = 1
    max_tries: int = 2
    retry_share: float = 0.2
    min_retries: int = 3
    retry_window_s: float = 60.0
    heartbeat_s: float = 1.0
    suspect_s: float = 2.5
    silence_s: float = 6.0
    silence_most_s: float = 20.0
    progress_s: float = 8.5
    lease_s: float = 10.0
    describe_s: float = 5.0
    open_s: float = 5.0
    send_s: float = 5.0
    backoff_first_s: float = 0.1
    backoff_most_s: float = 0.5
    backoff_young_s: float = 8.0
    lived_s: float = 10.0
    refused_first_s: float = 1.0
    refused_retry_s: float = 10.0
    reserve_s: float = 5.0
    grammar_s: float = 90.0
    unassign_after_s: float = 0.1
    settle_s: float = 2.0
    drain_s: float = 300.0
    tables_s: float = 5.0
    join_s: float = 10.0
    probe_after_s: float = 5.0
    probe_timeout_s: float = 5.0
    proof_timeout_s: float = 30.0
    ready_window_s: float = 10.0
    may_lack: frozenset[Role] = frozenset()
    compare_paths: bool = False
    follow_load: bool = False
    ttft_limit_s: float = 0.0
    orphan_s: float = 0.0
    starved: Starved = starved_s
