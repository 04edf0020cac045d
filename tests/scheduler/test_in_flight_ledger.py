"""What was given to an instance counts until the instance's own figures include it."""

from scheduler.load.in_flight_ledger import InFlightLedger
from scheduler.load.loads import HeldPrompts
from scheduler.load.prefixes import chain_of
from wire.load import LoadSnapshot

CHAIN = chain_of(range(100), "")  # one link, of 64 tokens


def load(*, used: int = 0, uncomputed: int = 0, running: int = 0, sought: int = 0) -> LoadSnapshot:
    return LoadSnapshot(
        blocks_total=10, blocks_used=used, blocks_probe=0, blocks_cached=0, running=running, waiting=0,
        uncomputed_tokens=uncomputed, held_prompts=0, progress_age_s=0.0, prefix_tokens_sought=sought,
    )  # fmt: skip


class _Changes:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_a_ledger_entry_ends_with_the_next_load_report() -> None:
    books = InFlightLedger(load(), _Changes())
    books.book_blocks("p", 4, 1)
    books.update(load())
    assert books.blocks_free == 6

    books.reserved("p")
    assert books.blocks_free == 6
    books.update(load(used=4))
    assert books.blocks_free == 6


def test_sequences_count_until_they_run() -> None:
    books = InFlightLedger(load(), _Changes())
    books.book_blocks("p", 4, 3)
    books.reserved("p")
    books.update(load(used=4))

    assert books.sequences == 3
    books.decoding("p")
    books.update(load(used=4, running=3))
    assert books.sequences == 3


def test_a_refusal_closes_the_instance_until_its_next_load() -> None:
    books = InFlightLedger(load(), _Changes())
    books.refused()

    assert books.blocks_free == 0
    books.update(load())
    assert books.blocks_free == 10


def test_outstanding_tokens_shrink_as_chunks_are_computed() -> None:
    books = InFlightLedger(load(), _Changes())
    books.give_prefill("p", 100)
    for _ in range(3):
        books.update(load())  # the command is not sent yet: these cannot include it
    assert books.outstanding_tokens == 100

    books.prefill_sent("p")
    books.update(load())  # may have been made before the command came
    assert books.outstanding_tokens == 100
    books.update(load(uncomputed=70))
    assert books.outstanding_tokens == 70
    books.prefilled("p")
    assert books.outstanding_tokens == 0


def test_dropping_a_prompt_returns_all_it_held_and_reports_it() -> None:
    changes = _Changes()
    books = InFlightLedger(load(), changes)
    books.give_prefill("p", 100)
    books.book_blocks("p", 4, 1)
    books.drop("p")
    books.drop("p")

    assert (books.outstanding_tokens, books.blocks_free, books.sequences) == (0, 10, 0)
    assert changes.count == 2


def test_blocks_of_a_handed_off_prompt_count_until_it_is_gone() -> None:
    books = InFlightLedger(load(), _Changes(), block_size=16)
    books.give_to_hand_off("p", 50, receiver=7, sequences=2)
    assert (books.blocks_free, books.held_for) == (6, {})

    books.update(load(used=4))
    books.prefilled("p")
    assert (books.blocks_free, books.held_for) == (6, {7: HeldPrompts(2, 64)})
    books.handed_off("p")
    assert (books.blocks_free, books.held_for) == (10, {})
    books.update(load(used=1))
    assert books.blocks_free == 9


def test_held_blocks_are_counted_by_receiver_until_the_prompt_ends() -> None:
    books = InFlightLedger(load(), _Changes(), block_size=16)
    for number, receiver in enumerate((7, 7, 8)):
        books.give_to_hand_off(f"p{number}", 16, receiver, 1)
        books.prefilled(f"p{number}")

    assert books.held_for == {7: HeldPrompts(2, 32), 8: HeldPrompts(1, 16)}
    books.drop("p0")
    books.handed_off("p2")
    books.handed_off("p2")
    assert books.held_for == {7: HeldPrompts(1, 16)}


def running_ledger(*, sought: int) -> InFlightLedger:
    """Return the ledger of an instance where a prompt of CHAIN generates, in 7 blocks of 16 tokens."""
    books = InFlightLedger(load(), _Changes(), block_size=16)
    books.carry("running", CHAIN)
    books.book_blocks("running", 7, 1)
    books.reserved("running", 0)
    books.decoding("running")
    books.update(load(used=7, running=1, sought=sought))
    return books


def test_a_generating_prompts_prefix_blocks_are_shared() -> None:
    books = running_ledger(sought=96)
    books.carry("p", CHAIN)
    books.book_blocks("p", 7, 1)

    assert books.tokens_shared(CHAIN) == 64
    assert books.blocks_free == 0  # 10, less 7 in use, less 3 that are not shared
    books.reserved("p", 64)
    assert books.blocks_free == 0
    books.drop("p")
    assert books.blocks_free == 3


def test_a_reservations_smaller_count_wins() -> None:
    books = running_ledger(sought=96)
    books.carry("p", CHAIN)
    books.book_blocks("p", 7, 1)
    books.reserved("p", 32)

    assert books.blocks_free == -2


def test_unused_cached_blocks_count_as_free() -> None:
    books = running_ledger(sought=96)
    books.drop("running")
    books.update(load(sought=96))
    books.carry("p", CHAIN)
    books.book_blocks("p", 7, 1)
    books.reserved("p", 64)

    assert (books.tokens_known(CHAIN), books.tokens_shared(CHAIN)) == (64, 0)
    assert books.blocks_free == 3


def test_an_instance_without_prefix_cache_shares_no_blocks() -> None:
    books = running_ledger(sought=0)
    books.carry("p", CHAIN)
    books.book_blocks("p", 7, 1)

    assert (books.tokens_known(CHAIN), books.tokens_shared(CHAIN)) == (0, 0)
    assert books.blocks_free == -4


def test_a_prompt_counts_on_prefill_and_its_output_on_decode() -> None:
    books, whole = InFlightLedger(load(sought=1), _Changes(), block_size=16), chain_of(range(200), "")
    books.carry("prefilled", CHAIN)
    books.give_to_hand_off("prefilled", 100, receiver=7, sequences=1)
    books.prefilled("prefilled")
    books.finished("prefilled", [whole])
    assert books.tokens_known(whole) == 64

    books.carry("generated", CHAIN)
    books.decoding("generated")
    books.finished("generated", [whole])
    books.drop("generated")
    assert (books.tokens_known(whole), books.tokens_shared(whole)) == (128, 0)
