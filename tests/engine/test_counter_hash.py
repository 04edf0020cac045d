"""Counter hash: the published splitmix64 stream, range, exactness in float32, independence of the coordinates."""

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.counter_hash import hash64, uniform, uniforms

words = st.integers(min_value=-(2**63), max_value=2**64 - 1)


def test_one_word_is_the_published_splitmix64_step() -> None:
    # First outputs of the reference splitmix64 (Vigna) seeded with 0 and with 1234567.
    assert hash64(0) == 0xE220A8397B1DCDAF
    assert hash64(1234567) == 6457827717110365317


@given(seed=words, sequence=st.integers(0, 2**20), position=st.integers(0, 2**24))
def test_uniform_is_below_one_and_exact_in_float32(seed: int, sequence: int, position: int) -> None:
    number = uniform(seed, sequence, position)

    assert 0.0 <= number < 1.0
    assert struct.unpack("f", struct.pack("f", number))[0] == number


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, 2**24)), min_size=1))
def test_arrays_equal_the_numbers_of_each_place_alone(places: list[tuple[int, int, int]]) -> None:
    seeds, sequences, positions = np.array(places, np.uint64).T

    assert uniforms(seeds, sequences, positions).tolist() == [uniform(*place) for place in places]


def test_every_coordinate_counts() -> None:
    base = uniform(7, 0, 0)

    assert len({base, uniform(8, 0, 0), uniform(7, 1, 0), uniform(7, 0, 1)}) == 4
    assert uniform(7, 1, 2) != uniform(7, 2, 1)
    assert uniform(7, 0, 0) == base


def test_numbers_are_evenly_distributed() -> None:
    counts = [0] * 16
    for position in range(16_000):
        counts[int(uniform(42, 0, position) * 16)] += 1

    assert all(850 < count < 1150 for count in counts)
