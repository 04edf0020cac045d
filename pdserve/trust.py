"""Build the trust of a ranktable process from the secret beside its table, the table, and the TLS flags."""

from collections.abc import Mapping

from flags.options import EngineOptions
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.peers import peer_addresses
from security.tls import tls_files
from security.trust import Trust, find_trust


def trust_of(plan: LaunchPlan, environ: Mapping[str, str], options: EngineOptions | None = None) -> Trust:
    """Return the trust of the process that `plan` describes. Raises ConfigError."""
    tls = None if options is None else tls_files(options.tls_cert, options.tls_key, options.tls_ca)
    return find_trust(environ, plan.global_path, peer_addresses(plan.global_table), tls)
