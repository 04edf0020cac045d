"""What was given to an instance counts until the instance's own figures hold it."""

from scheduler.books import Books
from scheduler.loads import Held
from wire.types import LoadSnapshot


def load(*, used: int = 0, uncomputed: int = 0, running: int = 0) -> LoadSnapshot:
    return LoadSnapshot(
        blocks_total=10, blocks_used=used, blocks_probe=0, blocks_cached=0, running=running, waiting=0,
        uncomputed_tokens=uncomputed, held_prompts=0, progress_age_s=0.0,
    )  # fmt: skip


class _Changes:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_a_booking_falls_away_with_the_first_load_after_the_reservation() -> None:
    books = Books(load(), _Changes())
    books.book_blocks("p", 4, 1)
    books.update(load())
    assert books.blocks_free == 6

    books.reserved("p")
    assert books.blocks_free == 6
    books.update(load(used=4))
    assert books.blocks_free == 6


def test_sequences_count_until_they_run() -> None:
    books = Books(load(), _Changes())
    books.book_blocks("p", 4, 3)
    books.reserved("p")
    books.update(load(used=4))

    assert books.sequences == 3
    books.decoding("p")
    books.update(load(used=4, running=3))
    assert books.sequences == 3


def test_a_refusal_closes_the_instance_until_its_next_load() -> None:
    books = Books(load(), _Changes())
    books.refused()

    assert books.blocks_free == 0
    books.update(load())
    assert books.blocks_free == 10


def test_outstanding_tokens_shrink_as_chunks_are_computed() -> None:
    books = Books(load(), _Changes())
    books.give_prefill("p", 100)
    for _ in range(3):
        books.update(load())  # the command is not sent yet: these cannot know it
    assert books.outstanding_tokens == 100

    books.prefill_sent("p")
    books.update(load())  # may have been made before the command came
    assert books.outstanding_tokens == 100
    books.update(load(uncomputed=70))
    assert books.outstanding_tokens == 70
    books.prefilled("p")
    assert books.outstanding_tokens == 0


def test_dropping_gives_everything_back_and_says_so() -> None:
    changes = _Changes()
    books = Books(load(), changes)
    books.give_prefill("p", 100)
    books.book_blocks("p", 4, 1)
    books.drop("p")
    books.drop("p")

    assert (books.outstanding_tokens, books.blocks_free, books.sequences) == (0, 10, 0)
    assert changes.count == 2


def test_blocks_of_a_prompt_to_be_handed_off_count_from_the_moment_it_is_given_until_it_is_gone() -> None:
    books = Books(load(), _Changes(), block_size=16)
    books.give_to_hand_off("p", 50, receiver=7, sequences=2)
    assert (books.blocks_free, books.held_for) == (6, {})

    books.update(load(used=4))
    books.prefilled("p")
    assert (books.blocks_free, books.held_for) == (6, {7: Held(2, 64)})
    books.handed_off("p")
    assert (books.blocks_free, books.held_for) == (10, {})
    books.update(load(used=1))
    assert books.blocks_free == 9


def test_what_is_held_is_counted_by_receiver_and_ends_with_the_prompt() -> None:
    books = Books(load(), _Changes(), block_size=16)
    for number, receiver in enumerate((7, 7, 8)):
        books.give_to_hand_off(f"p{number}", 16, receiver, 1)
        books.prefilled(f"p{number}")

    assert books.held_for == {7: Held(2, 32), 8: Held(1, 16)}
    books.drop("p0")
    books.handed_off("p2")
    books.handed_off("p2")
    assert books.held_for == {7: Held(1, 16)}
