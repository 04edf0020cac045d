"""The cluster secret: which file it is, who may read it, and what a proof proves."""

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from security.secret import Prover, Secret, Side, differ, find_secret, read_secret, readable
from tests.ranktable_tools.other_user import as_an_owner_without_access, as_another_user
from wire.errors import ConfigError

TEXT = "5f" * 32
SECRET, OTHER = Secret(TEXT.encode()), Secret(b"x" * 32)
ONE, TWO = bytes(range(16)), bytes(range(16, 32))


def write(path: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def test_the_secret_beside_the_table_is_found(tmp_path: Path) -> None:
    write(tmp_path / "cluster_secret")

    assert find_secret({}, str(tmp_path / "global.json")) == SECRET


def test_the_variable_wins_over_the_file_beside_the_table(tmp_path: Path) -> None:
    write(tmp_path / "cluster_secret")
    named = write(tmp_path / "named", "x" * 32)

    assert find_secret({"PDSERVE_SECRET_FILE": str(named)}, str(tmp_path / "global.json")) == OTHER


def test_without_a_file_there_is_no_secret(tmp_path: Path) -> None:
    assert find_secret({}, str(tmp_path / "global.json")) is None
    assert find_secret({"PDSERVE_SECRET_FILE": ""}, None) is None


def test_a_named_file_that_is_missing_is_an_error_with_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PDSERVE_SECRET_FILE: .*/gone cannot be read: No such file"):
        find_secret({"PDSERVE_SECRET_FILE": str(tmp_path / "gone")}, None)


def test_a_dangling_link_beside_the_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cluster_secret").symlink_to(tmp_path / "gone")

    with pytest.raises(ConfigError, match="cannot be read"):
        find_secret({}, str(tmp_path / "global.json"))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o601])
def test_a_file_others_can_reach_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "s", mode=mode)

    with pytest.raises(ConfigError, match=f"has mode {mode:04o}, but others must have no access: chmod 600"):
        read_secret(path)


def test_a_file_of_another_user_is_refused_with_both_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "s")
    owner = path.stat().st_uid
    real = os.fstat

    def owned_by_another(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[4] = owner + 4242
        return os.stat_result(fields)

    monkeypatch.setattr("security.secret.os.fstat", owned_by_another)

    with pytest.raises(ConfigError, match=f"belongs to uid {owner + 4242}, but this process is uid {os.geteuid()}"):
        read_secret(path)


def test_an_unreadable_file_of_another_user_is_reported_with_both(tmp_path: Path) -> None:
    path = tmp_path / "cluster_secret"
    path.write_text("s" * 32)
    owner = path.stat().st_uid

    with as_another_user(path), pytest.raises(ConfigError) as caught:
        read_secret(path)

    assert f"{path} cannot be read: Permission denied; it belongs to uid {owner}, and this process is uid " in str(
        caught.value
    )


def test_an_unreadable_file_of_our_user_is_reported_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "cluster_secret"
    path.write_text("s" * 32)

    with as_an_owner_without_access(path), pytest.raises(ConfigError) as caught:
        read_secret(path)

    assert str(caught.value).endswith(f" too: it has mode 0000, chmod 600 {path}")


@pytest.mark.parametrize(
    ("length", "words"), [(31, "has 31 bytes, but must have 32 to 4096"), (5000, "has more than 4096 bytes")]
)
def test_a_secret_that_is_too_short_or_long_is_refused_with_the_limit(tmp_path: Path, length: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_secret(write(tmp_path / "s", "a" * length))


def test_a_pipe_or_folder_in_its_place_does_not_block_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)

    with pytest.raises(ConfigError, match="not a regular file"):
        read_secret(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"cannot be read|not a regular file"):
        read_secret(tmp_path)


def test_neither_repr_nor_fingerprint_shows_the_secret() -> None:
    assert TEXT not in repr(SECRET)
    assert len(SECRET.fingerprint) == 8
    assert SECRET.fingerprint not in TEXT
    assert SECRET.fingerprint != OTHER.fingerprint


def test_a_proof_is_hmac_sha256_over_role_purpose_nonces_and_context() -> None:
    def part(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    parts = (b"pdserve proof 1", b"opener", b"kv", ONE, TWO, b"hello")
    expected = hmac.new(SECRET.value, b"".join(map(part, parts)), hashlib.sha256).digest()

    assert Prover(SECRET, "kv", ONE, TWO, b"hello").proof(Side.CLIENT) == expected


def test_a_proof_holds_for_its_own_handshake_only() -> None:
    meeting = Prover(SECRET, "kv", ONE, TWO, b"hello")
    proof = meeting.proof(Side.CLIENT)

    assert meeting.holds(Side.CLIENT, proof)
    assert not meeting.holds(Side.SERVER, proof)  # it cannot be sent back
    for other in (
        Prover(OTHER, "kv", ONE, TWO, b"hello"),
        Prover(SECRET, "grpc", ONE, TWO, b"hello"),
        Prover(SECRET, "kv", TWO, ONE, b"hello"),
        Prover(SECRET, "kv", ONE, TWO, b"hell"),
        Prover(SECRET, "kv", ONE, TWO + b"h", b"ello"),
    ):
        assert not other.holds(Side.CLIENT, proof)


@pytest.mark.parametrize("nonces", [(b"", TWO), (ONE, b"short"), (ONE, bytes(65))])
def test_a_proof_over_a_nonce_of_a_wrong_length_never_holds(nonces: tuple[bytes, bytes]) -> None:
    prover = Prover(SECRET, "kv", *nonces)

    assert not prover.holds(Side.CLIENT, prover.proof(Side.CLIENT))


@pytest.mark.parametrize("proof", [b"", b"\0", bytes(32), bytes(33)])
def test_no_forged_proof_holds(proof: bytes) -> None:
    assert not Prover(SECRET, "kv", ONE, TWO).holds(Side.CLIENT, proof)


def test_the_message_names_both_fingerprints_and_hosts() -> None:
    assert differ(SECRET, "hostA", "cd34cd34", "hostB") == (
        f"cluster secrets differ: {SECRET.fingerprint} here (hostA), cd34cd34 there (hostB)"
    )
    assert f"secret {SECRET.fingerprint} is set here (hostA), but none is set there (hostB)" in differ(
        SECRET, "hostA", "", "hostB"
    )
    assert "no cluster secret here (hostA), but cd34cd34 there (hostB)" in differ(None, "hostA", "cd34cd34", "hostB")


def test_an_invalid_fingerprint_is_not_quoted() -> None:
    assert readable("ab12cd34") == "ab12cd34"
    assert readable("") == ""
    assert readable("\n2026 ERROR") == readable("AB12CD34") == readable("a" * 9) == "unreadable"
