"""Every limit on structured output, in one place: on a request's text, on a compile, and on a step."""

from dataclasses import dataclass

from wire.check_prompt import MAX_GRAMMAR_BYTES

KIB = 1024
MIB = 1024 * KIB
MESSAGE_BYTES = 256 * MIB
"""The size limit for one message to or from the compiling child; a message may carry a form after JSON escaping."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on a request's text, on one compile, and on the cache.

    `optional_properties` limits those of one object of a schema, including those from allOf, $ref and the largest
    option of anyOf and oneOf: the time to compile them grows with the square of their number. `merged_parts` bounds the
    work of counting them.

    `cpu_s` and `memory_bytes` (above its idle size) end the compiling process; `compile_s` is the longest wait for its
    answer, `wait_s` the longest in the queue, which holds `queue_length` sources. On a busy machine the process may get
    1/30 of a core. `cache_bytes` bounds the cache, and so also one grammar; `fill_s` bounds the CPU time of one step.
    """

    source_bytes: int = MAX_GRAMMAR_BYTES
    nesting: int = 64
    choices: int = 4096
    optional_properties: int = 1000
    merged_parts: int = 200_000
    repetitions: int = 100_000
    form_bytes: int = 64 * MIB
    cpu_s: float = 2.0
    memory_bytes: int = 512 * MIB
    start_s: float = 60.0
    compile_s: float = 60.0
    wait_s: float = 30.0
    queue_length: int = 64
    cache_bytes: int = 64 * MIB
    fill_s: float = 0.05


@dataclass(frozen=True, slots=True)
class StepLimits:
    """llguidance's limits for one step, set so that no fill takes more than about 50 ms (measured as in the docs).

    Time grows with the square of the items of one row, and the rows of an ambiguous grammar can be long: so a grammar
    may use `grammar_items` in a step, other kinds `items`. Time grows linearly with `lexer_fuel` and `lexer_states`.
    """

    items: int = 20_000
    grammar_items: int = 4000
    items_in_row: int = 2000
    lexer_fuel: int = 35_000
    lexer_states: int = 20_000
    initial_lexer_fuel: int = 1_000_000
    grammar_symbols: int = 200_000
