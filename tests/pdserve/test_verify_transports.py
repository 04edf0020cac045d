"""Which transports `pdserve verify` runs: those of the machine, with a message for each missing one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtransfer import transport_table
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport_table import NAMES
from pdserve import verify
from pdserve.verify_runs import VerifyOutputs
from pdserve.verify_transports import EACH, Chosen, choose
from tests.engine.tiny_models import make_tiny_model
from wire.errors import ConfigError


class _Absent(TcpTransport):
    def unusable(self) -> str | None:
        return "its package is not installed"


def test_each_is_every_transport_or_its_reason() -> None:
    chosen = choose(EACH)

    assert {*chosen.names, *chosen.lacking} == set(NAMES)
    assert {"shm", "tcp"} <= set(chosen.names)
    assert all(chosen.lacking.values())


def test_a_missing_transport_is_named_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transport_table._MAKERS, "tcp", _Absent)

    chosen = choose(EACH, ("shm", "tcp"))

    assert (chosen.names, chosen.lacking) == (("shm",), {"tcp": "its package is not installed"})
    assert choose("shm").names == ("shm",)
    with pytest.raises(ConfigError, match="--transport tcp cannot run here: its package is not installed"):
        choose("tcp")
    with pytest.raises(ConfigError, match="no transport can run here: tcp: its package"):
        choose(EACH, ("tcp",))


@pytest.mark.parametrize("over_tcp", [7, 8])
def test_transports_that_run_are_compared_and_others_named(
    over_tcp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The instances' outputs are scripted; tests/cluster/test_verify.py has real processes."""

    def through_pd(*given: object) -> VerifyOutputs:
        transport = given[3]
        return VerifyOutputs([], [[7, 7, over_tcp if transport == "tcp" else 7]] * 2, 4096, [])

    monkeypatch.setattr("pdserve.verify.logs.configure", lambda _: None)
    monkeypatch.setattr(
        verify, "choose", lambda _, pair: Chosen(("shm", "tcp"), {"mooncake": "its package is missing"})
    )
    monkeypatch.setattr(verify, "through_pd", through_pd)
    combined = VerifyOutputs([(1, 2)] * 2, [[7, 7, 7]] * 2, 0, [3, 1])
    monkeypatch.setattr(verify, "through_combined", lambda *_: (combined, combined))
    oracle = SimpleNamespace(generate_greedy=lambda *_, **__: [[7, 7, 7]] * 2)
    monkeypatch.setattr(verify, "_run_transformers", lambda *_: (oracle, [[7, 7, 7]] * 2))

    status = verify.main(["--model", str(make_tiny_model("llama", tmp_path)), "--prompts", "2", "--max-tokens", "3"])
    output = capsys.readouterr().out.splitlines()

    assert "not run: P/D over mooncake: its package is missing" in output
    assert [line for line in output if line.startswith("served by P/D")] == [
        "served by P/D over shm: 4,096 bytes of KV sent", "served by P/D over tcp: 4,096 bytes of KV sent",
    ]  # fmt: skip
    equal = "equal: P/D over shm = P/D over tcp = combined = transformers (not run: mooncake)"
    parted = "DIFFERENT: P/D over tcp against transformers: prompt 0, token 2: 8 instead of 7"
    assert (status, output[-1]) == ((0, equal) if over_tcp == 7 else (1, parted))


def test_a_missing_model_is_refused_before_devices_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "choose_pairs", lambda _: pytest.fail("torch is imported for it"))

    with pytest.raises(ConfigError, match="--model /no/model is not a folder"):
        verify.main(["--model", "/no/model"])


@pytest.mark.parametrize("typed", [["--prompts", "0"], ["--max-tokens", "1"], ["--max-tokens", "1", "--features"]])
def test_too_few_prompts_or_tokens_to_prove_a_hand_off_are_refused(typed: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"use at least one prompt and two tokens \(prefill generates the first token, so one token"
    ):
        verify.parse(typed)
