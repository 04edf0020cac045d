"""What was given to an instance counts until the instance's own figures include it."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from scheduler.load.in_flight_ledger import InFlightLedger
from scheduler.load.loads import HeldPrompts, PromptFacts
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
    ledger = InFlightLedger(load(), _Changes())
    ledger.register("p", ())
    ledger.book_blocks("p", 4, 1)
    ledger.update(load())
    assert ledger.blocks_free == 6

    ledger.reserved("p")
    assert ledger.blocks_free == 6
    ledger.update(load(used=4))
    assert ledger.blocks_free == 6


def test_sequences_count_until_they_run() -> None:
    ledger = InFlightLedger(load(), _Changes())
    ledger.register("p", ())
    ledger.book_blocks("p", 4, 3)
    ledger.reserved("p")
    ledger.update(load(used=4))

    assert ledger.sequences == 3
    ledger.decoding("p")
    ledger.update(load(used=4, running=3))
    assert ledger.sequences == 3


def test_only_hand_offs_arrive_until_they_run() -> None:
    ledger = InFlightLedger(load(), _Changes())
    for prompt_id in ("here", "handed off"):
        ledger.register(prompt_id, ())
    ledger.assign_prefill("here", 40)
    ledger.book_blocks("here", 4, 2)
    assert ledger.arriving == 0

    ledger.book_blocks("handed off", 4, 3)
    assert (ledger.arriving, ledger.streams) == (3, 5)
    ledger.decoding("handed off")
    assert ledger.arriving == 0


def test_a_refusal_closes_the_instance_until_its_next_load() -> None:
    ledger = InFlightLedger(load(), _Changes())
    ledger.refused()

    assert ledger.blocks_free == 0
    ledger.update(load())
    assert ledger.blocks_free == 10


def test_outstanding_tokens_shrink_as_chunks_are_computed() -> None:
    ledger = InFlightLedger(load(), _Changes())
    ledger.register("p", ())
    ledger.assign_prefill("p", 100)
    for _ in range(3):
        ledger.update(load())  # the command is not sent yet: these cannot include it
    assert ledger.outstanding_tokens == 100

    ledger.prefill_sent("p")
    ledger.update(load())  # may have been made before the command came
    assert ledger.outstanding_tokens == 100
    ledger.update(load(uncomputed=70))
    assert ledger.outstanding_tokens == 70
    ledger.prefilled("p")
    assert ledger.outstanding_tokens == 0


def test_of_a_prompt_with_a_cached_prefix_the_rest_counts() -> None:
    ledger = InFlightLedger(load(sought=1), _Changes())
    for name in ("first", "second"):
        ledger.register(name, CHAIN)
        ledger.assign_prefill(name, 100)
        assert ledger.outstanding_tokens == {"first": 100, "second": 100 - 64}[name]
        ledger.prefilled(name)

    ledger.register("whole", chain_of(range(64), ""))
    ledger.assign_prefill("whole", 64)
    assert ledger.outstanding_tokens == 1, "the last token is always computed"


def test_a_prompt_with_images_counts_until_it_is_computed() -> None:
    ledger = InFlightLedger(load(), _Changes())
    for name in ("first", "second"):
        ledger.register(name, ())
        ledger.assign_prefill(name, 100, has_images=True)
        ledger.prefill_sent(name)
    for _ in range(3):
        ledger.update(load())  # an instance counts it once its images are encoded
    assert (ledger.outstanding_tokens, ledger.encoding_tokens) == (200, 100)

    ledger.prefilled("first")
    assert (ledger.outstanding_tokens, ledger.encoding_tokens) == (100, 100)
    ledger.drop("second")
    assert (ledger.outstanding_tokens, ledger.encoding_tokens) == (0, 0)


def test_dropping_a_prompt_returns_all_it_held_and_reports_it() -> None:
    changes = _Changes()
    ledger = InFlightLedger(load(), changes)
    ledger.register("p", ())
    ledger.assign_prefill("p", 100)
    ledger.book_blocks("p", 4, 1)
    ledger.drop("p")
    ledger.drop("p")

    assert (ledger.outstanding_tokens, ledger.blocks_free, ledger.sequences) == (0, 10, 0)
    assert changes.count == 2


def test_blocks_of_a_handed_off_prompt_count_until_it_is_gone() -> None:
    ledger = InFlightLedger(load(), _Changes(), block_size=16)
    ledger.register("p", ())
    ledger.assign_hand_off("p", PromptFacts(50, 9, num_sequences=2), receiver=7)
    assert (ledger.blocks_free, ledger.held_for) == (6, {})

    ledger.update(load(used=4))
    ledger.prefilled("p")
    assert (ledger.blocks_free, ledger.held_for) == (6, {7: HeldPrompts(2, 64)})
    ledger.handed_off("p")
    assert (ledger.blocks_free, ledger.held_for) == (10, {})
    ledger.update(load(used=1))
    assert ledger.blocks_free == 9


def test_kept_blocks_count_until_the_loads_include_them() -> None:
    ledger = InFlightLedger(load(), _Changes(), block_size=16)
    ledger.register("p", ())
    ledger.assign_hand_off("p", PromptFacts(50, 9, num_sequences=2), receiver=7)
    ledger.prefilled("p")
    ledger.keep("p")
    ledger.drop("p")
    assert (ledger.blocks_free, ledger.held_for) == (6, {})

    ledger.update(load())  # taken before the prefill
    assert ledger.blocks_free == 6
    ledger.update(load(used=4))
    assert ledger.blocks_free == 6
    ledger.update(load())
    assert ledger.blocks_free == 10


def test_held_blocks_are_counted_by_receiver_until_the_prompt_ends() -> None:
    ledger = InFlightLedger(load(), _Changes(), block_size=16)
    for number, receiver in enumerate((7, 7, 8)):
        ledger.register(f"p{number}", ())
        ledger.assign_hand_off(f"p{number}", PromptFacts(16, 9), receiver)
        ledger.prefilled(f"p{number}")

    assert ledger.held_for == {7: HeldPrompts(2, 32), 8: HeldPrompts(1, 16)}
    ledger.drop("p0")
    ledger.handed_off("p2")
    ledger.handed_off("p2")
    assert ledger.held_for == {7: HeldPrompts(1, 16)}


def running_ledger(*, sought: int) -> InFlightLedger:
    """Return the ledger of an instance where a prompt of CHAIN generates, in 7 blocks of 16 tokens."""
    ledger = InFlightLedger(load(), _Changes(), block_size=16)
    ledger.register("running", CHAIN)
    ledger.book_blocks("running", 7, 1)
    ledger.reserved("running", 0)
    ledger.decoding("running")
    ledger.update(load(used=7, running=1, sought=sought))
    return ledger


def test_a_generating_prompts_prefix_blocks_are_shared() -> None:
    ledger = running_ledger(sought=96)
    ledger.register("p", CHAIN)
    ledger.book_blocks("p", 7, 1)

    assert ledger.tokens_shared(CHAIN) == 64
    assert ledger.blocks_free == 0  # 10, less 7 in use, less 3 that are not shared
    ledger.reserved("p", 64)
    assert ledger.blocks_free == 0
    ledger.drop("p")
    assert ledger.blocks_free == 3


def test_a_reservations_smaller_count_wins() -> None:
    ledger = running_ledger(sought=96)
    ledger.register("p", CHAIN)
    ledger.book_blocks("p", 7, 1)
    ledger.reserved("p", 32)

    assert ledger.blocks_free == -2


def test_unused_cached_blocks_count_as_free() -> None:
    ledger = running_ledger(sought=96)
    ledger.drop("running")
    ledger.update(load(sought=96))
    ledger.register("p", CHAIN)
    ledger.book_blocks("p", 7, 1)
    ledger.reserved("p", 64)

    assert (ledger.tokens_known(CHAIN), ledger.tokens_shared(CHAIN)) == (64, 0)
    assert ledger.blocks_free == 3


def test_an_instance_without_prefix_cache_shares_no_blocks() -> None:
    ledger = running_ledger(sought=0)
    ledger.register("p", CHAIN)
    ledger.book_blocks("p", 7, 1)

    assert (ledger.tokens_known(CHAIN), ledger.tokens_shared(CHAIN)) == (0, 0)
    assert ledger.blocks_free == -4


def test_a_prompt_counts_on_prefill_and_its_output_on_decode() -> None:
    ledger, whole = InFlightLedger(load(sought=1), _Changes(), block_size=16), chain_of(range(200), "")
    ledger.register("prefilled", CHAIN)
    ledger.assign_hand_off("prefilled", PromptFacts(100, 9), receiver=7)
    ledger.prefilled("prefilled")
    ledger.finished("prefilled", [whole])
    assert ledger.tokens_known(whole) == 64

    ledger.register("generated", CHAIN)
    ledger.decoding("generated")
    ledger.finished("generated", [whole])
    ledger.drop("generated")
    assert (ledger.tokens_known(whole), ledger.tokens_shared(whole)) == (128, 0)


STEPS: list[Callable[[InFlightLedger, str], None]] = [
    lambda ledger, prompt: ledger.assign_prefill(prompt, 100),
    lambda ledger, prompt: ledger.assign_hand_off(prompt, PromptFacts(50, 9, num_sequences=2), receiver=7),
    lambda ledger, prompt: ledger.book_blocks(prompt, 4, 3),
    lambda ledger, prompt: ledger.reserved(prompt, 16),
    lambda ledger, prompt: ledger.update(load()),
    InFlightLedger.unassign,
    InFlightLedger.prefill_sent,
    InFlightLedger.prefilled,
    InFlightLedger.decoding,
    InFlightLedger.handed_off,
    InFlightLedger.keep,
    InFlightLedger.drop,
]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from("abc"))))
def test_after_any_steps_nothing_is_left_of_dropped_prompts(
    steps: list[tuple[Callable[[InFlightLedger, str], None], str]],
) -> None:
    ledger = InFlightLedger(load(), _Changes(), block_size=16)
    for step, prompt_id in steps:
        if prompt_id not in ledger.prompt_ids:
            ledger.register(prompt_id, CHAIN)
        step(ledger, prompt_id)
    for prompt_id in "abc":
        ledger.drop(prompt_id)
    for _ in range(2):  # until kept blocks are the snapshots'
        ledger.update(load())

    assert (ledger.outstanding_tokens, ledger.blocks_free, ledger.sequences, ledger.held_for) == (0, 10, 0, {})
    assert not ledger.prompt_ids
