"""--ip and --kv-ip are checked against the table and this machine; the collectives' variables follow them."""

import pytest

from flags.options import EngineOptions
from pdserve.addresses import check_kv_address, network_variables, with_own_address
from ranktable_tools.interfaces import interface_addresses, interface_of
from security.secret import Secret
from security.trust import Trust
from wire.errors import ConfigError, Incompatible

TABLE = Trust(addresses=frozenset({"10.0.0.18"}), loopback=False)


def _interfaces(address: str) -> str | None:
    return {"10.0.0.18": "eth0", "10.0.1.18": "eth1"}.get(address)


def test_an_instance_listens_on_ip_unless_host_is_given() -> None:
    assert with_own_address(EngineOptions(ip="10.0.0.18"), "10.0.0.18").host == "10.0.0.18"
    assert with_own_address(EngineOptions(ip="10.0.0.18", host="0.0.0.0"), "10.0.0.18").host == "0.0.0.0"
    assert with_own_address(EngineOptions(), "10.0.0.18").host == "127.0.0.1"


def test_another_ip_than_the_tables_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match=r"--ip 10.0.0.9 is not server_ip 10.0.0.18"):
        with_own_address(EngineOptions(ip="10.0.0.9"), "10.0.0.18")


def test_kv_ip_is_an_address_of_this_machine_that_peers_accept() -> None:
    check_kv_address(None, TABLE)
    check_kv_address("10.0.0.18", TABLE, lambda: ("10.0.0.18",))
    check_kv_address("10.0.1.18", Trust(secret=Secret(b"s" * 32)), lambda: ("10.0.1.18",))
    with pytest.raises(ConfigError, match=r"--kv-ip '10.0.0.\*' is not an IP address such as"):
        check_kv_address("10.0.0.*", TABLE)
    with pytest.raises(
        ConfigError, match=r"--kv-ip 10.0.9.9 is not an address of this machine, which has 10.0.0.18, 127"
    ):
        check_kv_address("10.0.9.9", TABLE, lambda: ("10.0.0.18",))
    with pytest.raises(Incompatible, match=r"10.0.1.18 is not in the global table .* no cluster secret"):
        check_kv_address("10.0.1.18", TABLE, lambda: ("10.0.1.18",))


def test_each_address_of_this_machine_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"which has 127.0.0.1, 10.0.0.18, ::1$"):
        check_kv_address("10.0.9.9", TABLE, lambda: ("127.0.0.1", "10.0.0.18", "::1"))


def test_the_variables_of_the_collectives_follow_the_address() -> None:
    assert network_variables("10.0.1.18", "npu", {}, _interfaces) == {
        "GLOO_SOCKET_IFNAME": "eth1", "HCCL_IF_IP": "10.0.1.18", "HCCL_SOCKET_IFNAME": "=eth1",
    }  # fmt: skip
    assert network_variables("10.0.0.18", "cuda", {}, _interfaces) == {
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0",
    }  # fmt: skip
    assert network_variables("10.0.0.18", "cpu", {}, _interfaces) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_a_variable_that_is_already_set_stays() -> None:
    found = network_variables("10.0.0.18", "npu", {"HCCL_IF_IP": "10.9.9.9", "GLOO_SOCKET_IFNAME": "eth7"}, _interfaces)

    assert found == {"HCCL_SOCKET_IFNAME": "=eth0"}


_NAMES = {
    "localhost": frozenset({"localhost"}), "node-1": frozenset({"10.0.1.18", "10.7.7.7"}),
    "debian": frozenset({"127.0.1.1"}), "elsewhere": frozenset({"10.7.7.7"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("127.0.0.1", None), ("127.0.0.2", None), ("::1", None), ("localhost", None),
        ("node-1", "eth1"), ("10.7.7.7", "eth0"), ("elsewhere", "eth0"), ("debian", "eth0"), ("unknown", "eth0"),
    ],
)  # fmt: skip
def test_only_loopback_has_no_interface(address: str, interface: str | None) -> None:
    """An address of no interface, and a name without one, is reached by the default route's, here eth0."""

    def look_up(name: str) -> frozenset[str]:
        return _NAMES.get(name, frozenset())

    found = network_variables(address, "cuda", {}, _interfaces, look_up, lambda: "10.0.0.18")

    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    assert found == ({} if interface is None else wanted)


@pytest.mark.parametrize("own", ["127.0.0.1", "10.9.9.9"])
def test_without_a_network_the_libraries_choose(own: str) -> None:
    found = network_variables("10.7.7.7", "npu", {}, {"127.0.0.1": "lo"}.get, own=lambda: own)

    assert found == {}


def test_the_kernel_names_the_interface_of_each_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    assert all(interface_of(address) for address in interface_addresses())
