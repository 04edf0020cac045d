"""The server's nonces: single use, short life, and no memory for callers that never use theirs."""

import sys

from security.nonces import NONCE_BYTES, NONCE_LIFE_S, NonceMint

CLIENT = bytes(range(32))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_nonce_is_valid_once() -> None:
    mint = NonceMint(Clock())
    nonce = mint.issue(CLIENT)

    assert len(nonce) == NONCE_BYTES
    assert mint.problem(nonce, CLIENT) is None
    mint.use(nonce)
    assert mint.problem(nonce, CLIENT) == "its nonce was used before"


def test_a_nonce_is_valid_for_its_lifetime_and_its_age_is_reported() -> None:
    clock = Clock()
    mint = NonceMint(clock)
    nonce = mint.issue(CLIENT)

    clock.now += NONCE_LIFE_S
    assert mint.problem(nonce, CLIENT) is None
    clock.now += 1.5
    assert mint.problem(nonce, CLIENT) == "its nonce is 11.5 s old, but the limit is 10 s"


def test_a_used_nonce_never_becomes_valid_again() -> None:
    clock = Clock()
    mint = NonceMint(clock)
    nonce = mint.issue(CLIENT)
    mint.use(nonce)

    for _ in range(40):
        clock.now += 0.5
        assert mint.problem(nonce, CLIENT) is not None


def test_a_nonce_of_another_server_or_a_forged_one_is_refused() -> None:
    mint = NonceMint(Clock())
    mine, foreign = mint.issue(CLIENT), NonceMint(Clock()).issue(CLIENT)

    for nonce, client in ((foreign, CLIENT), (mine, bytes(32)), (mine[:-1], CLIENT), (b"", CLIENT), (bytes(40), b"")):
        assert mint.problem(nonce, client) == "its nonce was not issued by this process"


def test_nonces_cost_no_memory_and_used_ones_are_bounded() -> None:
    clock = Clock()
    mint = NonceMint(clock, max_used=3)
    before = sys.getsizeof(mint._expiry_by_used)
    issued = [mint.issue(CLIENT) for _ in range(10_000)]

    assert sys.getsizeof(mint._expiry_by_used) == before
    for nonce in issued[:3]:
        mint.use(nonce)
    assert mint.problem(issued[3], CLIENT) == "3 nonces were used within 10 s, which is the limit"
    clock.now += NONCE_LIFE_S
    assert mint.problem(mint.issue(CLIENT), CLIENT) is None
