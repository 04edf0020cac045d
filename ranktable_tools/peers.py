"""The addresses of a global table's hosts: a connection from any other address is not a peer's.

A host that has only another engine's workers is not a peer: workers are called and never call.
"""

from ranktable_tools.addresses import canonical, own_hosts, resolve
from ranktable_tools.tables import GlobalTable


def peer_addresses(table: GlobalTable) -> frozenset[str]:
    """Return the addresses and names of the table's hosts; names are resolved once, now.

    If the table includes this machine, all its addresses and loopback are included: its processes may call from any.
    """
    own, found = own_hosts(), set[str]()
    own_engine = (instance.server for instance in table.instances if instance.server.worker is None)
    for server in (table.scheduler, *own_engine):
        spelled = canonical(server.server_ip)
        meaning = {spelled} if spelled in own else {spelled, *resolve(spelled)}
        # Debian's /etc/hosts names the machine itself 127.0.1.1.
        local = not meaning.isdisjoint(own) or any(address.startswith("127.") for address in meaning)
        found |= meaning | (own if local else set())
    return frozenset(found)
