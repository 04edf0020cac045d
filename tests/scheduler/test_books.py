"""What was given to an instance counts until the instance's own figures hold it."""

from scheduler.books import Books
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
