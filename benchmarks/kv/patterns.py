"""Our hand-offs compared with each other: scattered pools, many at once, many pairs; and small complete hand-offs."""

from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

from benchmarks.kv.pair import Ours
from benchmarks.kv.rounds import Cache, in_turn, print_progress, ratio_of
from benchmarks.kv.shapes import BLOCK_SIZE, MIB, Shape, shape_named
from benchmarks.kv.speed import CHUNK, both_modes
from benchmarks.kv.table import Row

SCATTERED_BLOCKS = 4096
SCATTERED_LIMIT = 1.3
MANY, MANY_MIB, MANY_GOAL = 64, 16, 0.9
PAIRS, PAIRS_GOAL, WINDOW = 4, 0.9, 4
SMALL_TOKENS, SMALL_LIMIT_MS = 64, {"shm": 2.0, "tcp": 4.0}
POOL_BYTES = {"fake": 16 * MIB, "default": 1024 * MIB}


def measure_scattered(transport: str, blocks: int, rounds: int, cache: Cache) -> Iterator[Row]:
    """Compare a prompt in blocks that are never adjacent, on both sides, with one in contiguous blocks."""
    shape = shape_named("default")
    num_bytes = blocks * BLOCK_SIZE * shape.token_bytes
    print_progress(f"{transport}: {blocks} single blocks, {num_bytes // MIB} MiB, against one run")
    with both_modes(transport, num_bytes) as ours:
        for on, pair in ours.items():
            for chunk, put in ((None, "a layer at a time"), (CHUNK, f"chunks of {CHUNK}")):
                for scattered in (True, False):
                    pair.move(num_bytes, verify=True, chunk=chunk, scattered=scattered)
                turns = {
                    "scattered": lambda pair=pair, chunk=chunk: pair.move(num_bytes, chunk=chunk, scattered=True),
                    "contiguous": lambda pair=pair, chunk=chunk: pair.move(num_bytes, chunk=chunk),
                }
                seconds = in_turn(turns, rounds, cache)
                yield Row(
                    f"{transport}, digest {'on' if on else 'off'}, {blocks} single blocks, {put}",
                    "ms", 1e3 * median(seconds["scattered"]), "contiguous", 1e3 * median(seconds["contiguous"]),
                    ratio_of(seconds["contiguous"], seconds["scattered"]), SCATTERED_LIMIT, at_least=False,
                )  # fmt: skip


def measure_many(transport: str, mib: int, rounds: int, cache: Cache) -> Iterator[Row]:
    """Compare 64 concurrent hand-offs with one of as many bytes."""
    shape = shape_named("default")
    stride = -(-shape.tokens_of(mib * MIB) // BLOCK_SIZE)
    each = stride * BLOCK_SIZE
    num_bytes = MANY * each * shape.token_bytes
    print_progress(f"{transport}: {MANY} hand-offs of {mib} MiB at once against one of {num_bytes // MIB} MiB")
    with both_modes(transport, num_bytes) as ours:
        for on, pair in ours.items():

            def many(pair: Ours = pair) -> float:
                return float(pair.hand(tokens=each, chunk=each, count=MANY, stride=stride)["seconds"])

            pair.decodes[0].ask(op="clear")
            many()
            for i in (0, MANY // 2, MANY - 1):
                pair.verify(each, first=i * stride)
            pair.move(num_bytes, verify=True)
            turns = {"many": many, "one": lambda pair=pair: pair.move(num_bytes)}
            seconds = in_turn(turns, rounds, cache)
            rate = {name: num_bytes / median(values) / 1e9 for name, values in seconds.items()}
            yield Row(
                f"{transport}, digest {'on' if on else 'off'}, {MANY} hand-offs of {mib} MiB at once",
                "GB/s", rate["many"], f"one of {num_bytes // MIB} MiB", rate["one"],
                ratio_of(seconds["many"], seconds["one"]), MANY_GOAL,
            )  # fmt: skip


def measure_small(transport: str, hand_offs: int, pool_bytes: int | None) -> Iterator[Row]:
    """Time a 64-token prompt from the request for D's ticket to the ack, one at a time."""
    for name in ("fake", "default"):
        shape = shape_named(name)
        blocks = (pool_bytes or POOL_BYTES[name]) // (shape.token_bytes * BLOCK_SIZE)
        print_progress(f"{transport}: {hand_offs} prompts of {SMALL_TOKENS} tokens, {name} pool")
        with Ours(transport, shape, blocks) as pair:
            per_prompt = SMALL_TOKENS // BLOCK_SIZE
            pair.move(SMALL_TOKENS * shape.token_bytes, verify=True)
            took = [
                pair.hand(tokens=SMALL_TOKENS, chunk=CHUNK, first=i % (blocks // per_prompt) * per_prompt)["total_s"]
                for i in range(hand_offs)
            ]
        goal = SMALL_LIMIT_MS.get(transport) if name == "fake" else None
        measure = f"{transport}, {SMALL_TOKENS} tokens, reserve to ack, {name} pool, median of {hand_offs}"
        yield Row(measure, "ms", 1e3 * median(took), goal=goal, at_least=False)


def measure_pairs(transport: str, rounds: int, seconds: float, pool_bytes: int | None) -> Iterator[Row]:
    """Compare the total rate of 4 P and 4 D, every P to every D, with that of one pair, on the same cores."""
    for name in ("fake", "default"):
        shape = shape_named(name)
        blocks = _pool_blocks(shape, pool_bytes or min(POOL_BYTES[name], 128 * MIB))
        print_progress(f"{transport}: {PAIRS} P x {PAIRS} D against one pair, {name} pool")
        with ExitStack() as stack:
            one = stack.enter_context(Ours(transport, shape, blocks))
            four = stack.enter_context(Ours(transport, shape, blocks, num_p=PAIRS, num_d=PAIRS))
            rates: dict[Ours, list[float]] = {one: [], four: []}
            costs: dict[Ours, list[float]] = {one: [], four: []}  # CPU seconds of a hand-off, on both sides together
            for number in range(rounds + 1):
                for group in (one, four) if number % 2 else (four, one):
                    before, lasts = group.cpu_s, seconds if number else seconds / 4
                    rate = group.stream(CHUNK, CHUNK, WINDOW, lasts)
                    if number:  # the first round opens the links
                        rates[group].append(rate)
                        costs[group].append((group.cpu_s - before) * CHUNK * shape.token_bytes / (rate * lasts))
        cost_ms = [1e3 * median(costs[group]) for group in (one, four)]
        print_progress("CPU of a hand-off: {:.2f} ms for one pair, {:.2f} ms for all pairs".format(*cost_ms))
        yield Row(
            f"{transport}, {PAIRS} P x {PAIRS} D, prompts of {CHUNK} tokens, {name} pool",
            "MB/s", median(rates[four]) / 1e6, "one pair", median(rates[one]) / 1e6,
            median(a / b for a, b in zip(rates[four], rates[one], strict=True)),
            PAIRS_GOAL if name == "fake" else None,
        )  # fmt: skip


def _pool_blocks(shape: Shape, pool_bytes: int) -> int:
    return pool_bytes // (shape.token_bytes * BLOCK_SIZE)
