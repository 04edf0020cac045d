"""The server's nonces: single use, short life, and no memory for callers that never use theirs."""

import sys

from security.nonces import NONCE_BYTES, NONCE_LIFE_S, NonceMint

OPENER = bytes(range(32))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_nonce_is_valid_once() -> None:
    mint = NonceMint(Clock())
    nonce = mint.issue(OPENER)

    assert len(nonce) == NONCE_BYTES
    assert mint.problem(nonce, OPENER) is None
    mint.use(nonce)
    assert mint.problem(nonce, OPENER) == "its nonce was used before"


def test_a_nonce_is_valid_for_its_lifetime_and_its_age_is_reported() -> None:
    clock = Clock()
    mint = NonceMint(clock)
    nonce = mint.issue(OPENER)

    clock.now += NONCE_LIFE_S
    assert mint.problem(nonce, OPENER) is None
    clock.now += 1.5
    assert mint.problem(nonce, OPENER) == "its nonce is 11.5 s old, the limit is 10 s"


def test_a_used_nonce_never_becomes_valid_again() -> None:
    clock = Clock()
    mint = NonceMint(clock)
    nonce = mint.issue(OPENER)
    mint.use(nonce)

    for _ in range(40):
        clock.now += 0.5
        assert mint.problem(nonce, OPENER) is not None


def test_a_nonce_of_another_server_or_a_forged_one_is_refused() -> None:
    mint = NonceMint(Clock())
    mine, foreign = mint.issue(OPENER), NonceMint(Clock()).issue(OPENER)

    for nonce, opener in ((foreign, OPENER), (mine, bytes(32)), (mine[:-1], OPENER), (b"", OPENER), (bytes(40), b"")):
        assert mint.problem(nonce, opener) == "its nonce was not issued by this process"


def test_nonces_cost_no_memory_and_used_ones_are_bounded() -> None:
    clock = Clock()
    mint = NonceMint(clock, max_used=3)
    before = sys.getsizeof(mint._expiry_by_used)
    issued = [mint.issue(OPENER) for _ in range(10_000)]

    assert sys.getsizeof(mint._expiry_by_used) == before
    for nonce in issued[:3]:
        mint.use(nonce)
    assert mint.problem(issued[3], OPENER) == "3 nonces were used within 10 s, the limit is reached"
    clock.now += NONCE_LIFE_S
    assert mint.problem(mint.issue(OPENER), OPENER) is None
