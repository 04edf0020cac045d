"""Which peers the processes of a laid-out cluster trust."""

from pathlib import Path

import pytest

from flags.options import EngineOptions
from pdserve.instance_flags import launch
from pdserve.layout import ClusterShape, environment, lay_out
from pdserve.trust import trust_of
from ranktable_tools.launch_plan import resolve
from wire.errors import ConfigError

SHAPE = ClusterShape(1, 1, "127.0.0.1", 9000, ())


def test_all_processes_of_up_find_one_secret_beside_their_tables(tmp_path: Path) -> None:
    plans = lay_out(SHAPE, tmp_path)
    others = {"PDSERVE_SECRET_FILE": "/of/another/cluster"}
    trusts = [trust_of(resolve(environ), environ) for environ in (environment(plan, others) for plan in plans)]

    assert len({trust.secret for trust in trusts}) == 1
    assert trusts[0].secret is not None
    assert trusts[0].secret.value == (tmp_path / "cluster_secret").read_bytes().strip()
    assert all(trust.has_address("127.0.0.1") and not trust.has_address("192.0.2.200") for trust in trusts)


def test_without_the_file_the_tables_addresses_are_trusted(tmp_path: Path) -> None:
    plan, *_ = lay_out(SHAPE, tmp_path)
    (tmp_path / "cluster_secret").unlink()
    environ = environment(plan, {})

    trust = trust_of(resolve(environ), environ)

    assert trust.secret is None
    assert "127.0.0.1" in trust.addresses


def test_an_instance_gets_the_trust_and_its_tls_files(tmp_path: Path) -> None:
    plan, *_ = lay_out(SHAPE, tmp_path)
    environ = environment(plan, {})
    resolved = resolve(environ)
    options = EngineOptions(model="m", tls_cert="only.pem")

    with pytest.raises(ConfigError, match=r"missing: --tls-key, --tls-ca"):
        trust_of(resolved, environ, options)
    trust = trust_of(resolved, environ)
    assert launch(EngineOptions(model="m", max_model_len=64), resolved, trust).config.trust is trust
