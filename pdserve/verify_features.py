"""`pdserve verify --features`: every feature in every serving mode, as a table."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from engine.oracle import load_plain
from engine.reference_decoding import ReferenceDecoder
from pdserve import feature_preemption as preemption
from pdserve.feature_cases import FeatureCase, Vocabulary, make_cases
from pdserve.feature_judges import Answers, CasePrompt
from pdserve.feature_runs import FeatureOutputs, serve_cases
from pdserve.feature_stops import choose_stop
from pdserve.text_table import text_table
from pdserve.verify_devices import DeviceKindPair
from pdserve.verify_runs import alone, pair
from scheduler.model.files import read_model_files
from scheduler.tokens import Tokens
from wire.errors import ConfigError

COMBINED = "combined"
EQUAL, MEANINGLESS, WRONG = "equal", "n/a", "WRONG"
TIE = 2e-5
"""A draw from [0, 1) this near a boundary between two tokens may differ if float32 sums are in another order."""
_MAX_SEEDS = 20
_BLOCK = 16
_SHARE = 10
"""The preempted runs' pool has this fraction (1/10) of the blocks that all cases need at once."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One feature in one serving mode: `verdict` is equal, n/a or WRONG; `reason` explains the last two."""

    verdict: str
    reason: str = ""


def verify_features(
    model: Path, work: Path, prompts: Sequence[tuple[int, ...]], transports: Sequence[str], max_tokens: int,
    device: str,
) -> int:  # fmt: skip
    """Serve every feature in every way on `device` and print the table; return 1 where a cell is not equal, else 0."""
    decoder = ReferenceDecoder(load_plain(model, "float32"))
    vocabulary = read_vocabulary(model)
    cases = make_cases(prompts, vocabulary, max_tokens)
    decoder.prepare(
        (prompt.token_ids, prompt.params)
        for case in cases
        if not case.compared
        for prompt in case.prompts
        if prompt.generates
    )
    cases = [settled(case, decoder, vocabulary.decode) for case in cases]
    columns = _serve_all(model, work, cases, transports, preemption.environment_of(max_tokens), device)
    rows = {case.name: judge(case, columns, decoder) for case in cases}
    print("\n".join(report(list(columns), rows)))
    return 1 if any(cell.verdict == WRONG for cells in rows.values() for cell in cells) else 0


def report(columns: Sequence[str], rows: Mapping[str, Sequence[Cell]]) -> list[str]:
    """Return the lines of the table, of the reasons for cells that are not equal, and of the overall verdict."""
    lines = text_table(["feature", *columns], [[name, *(c.verdict for c in cells)] for name, cells in rows.items()])
    for name, cells in rows.items():
        lines += [f"{c.verdict}: {name}, {way}: {c.reason}" for way, c in zip(columns, cells, strict=True) if c.reason]
    wrong = [name for name, cells in rows.items() if any(cell.verdict == WRONG for cell in cells)]
    left_out = sum(cell.verdict == MEANINGLESS for cells in rows.values() for cell in cells)
    cells_out = f", {left_out} cell{'' if left_out == 1 else 's'} n/a" if left_out else ""
    features, ways = "feature" if len(rows) == 1 else "features", "way" if len(columns) == 1 else "ways"
    whole = f"equal: {len(rows)} {features} in {len(columns)} {ways} of serving{cells_out}"
    return [*lines, f"not equal: {', '.join(wrong)}" if wrong else whole]


def settled(case: FeatureCase, decoder: ReferenceDecoder, decode: Callable[[Sequence[int]], str]) -> FeatureCase:
    """Return the case with the first seeds whose draws are clear: none is so near the boundary between two tokens that
    rounding could choose the other; and with its stop strings. Raises ConfigError if no seed is clear.
    """
    if case.compared or case.prompts[0].pooling is not None or case.prompts[0].params.temperature == 0:
        return case
    return replace(
        case,
        prompts=tuple(_settled_prompt(prompt, decoder, decode if case.stops else None) for prompt in case.prompts),
    )


def _settled_prompt(
    prompt: CasePrompt, decoder: ReferenceDecoder, decode: Callable[[Sequence[int]], str] | None
) -> CasePrompt:
    for seed in range(prompt.params.seed, prompt.params.seed + _MAX_SEEDS):
        params = replace(prompt.params, seed=seed)
        every = decoder.decode(prompt.token_ids, replace(params, n=params.num_sequences, best_of=None))
        if any(one.margin <= TIE for one in every):
            continue
        if decode is None:
            return replace(prompt, params=params)
        if (stop := choose_stop(every[0].token_ids, decode)) is not None:
            return replace(prompt, params=params, stops=(stop,))
    raise ConfigError(
        f"with each of {_MAX_SEEDS} seeds some token is too close to a tie, or no stop string can be chosen: "
        "lower --max-tokens"
    )


def judge(case: FeatureCase, columns: Mapping[str, FeatureOutputs], decoder: ReferenceDecoder) -> list[Cell]:
    """Return the cells of one feature, in the columns' order."""
    return [_cell(case, way, columns, decoder) for way in columns]


def read_vocabulary(model: Path) -> Vocabulary:
    """Read the cases' vocabulary from a model folder."""
    files, tokenizer = read_model_files(str(model)), Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return Vocabulary(files.vocab_size or tokenizer.get_vocab_size(), files.eos_token_ids, encode, decode)


def small_pool_tokens(cases: Sequence[FeatureCase]) -> int:
    """Return the tokens of a pool for a tenth of what all cases need at once, but at least for the largest one."""
    needs = [
        prompt.params.width * (len(prompt.token_ids) + prompt.params.max_tokens + _BLOCK)
        for case in cases
        for prompt in case.prompts
    ]
    return max(max(needs), sum(needs) // _SHARE)


def _serve_all(
    model: Path, work: Path, cases: Sequence[FeatureCase], transports: Sequence[str], stopping: Mapping[str, str],
    device: str,
) -> dict[str, FeatureOutputs]:  # fmt: skip
    flags = ("--model", str(model), "--dtype", "float32", "--block-size", str(_BLOCK), "--device", device)
    large = (*flags, "--kv-cache-memory", "256MiB")
    columns: dict[str, FeatureOutputs] = {}
    tokens = Tokens(read_model_files(str(model)))
    with asyncio.Runner() as runner:
        columns[COMBINED] = serve_cases(runner, work / "combined", alone(large), cases, tokens)
        print(f"served: {COMBINED}", flush=True)
        for name in transports:
            both = pair(work / name, large, name, DeviceKindPair(device, device))
            columns[f"P/D {name}"] = serve_cases(runner, work / name, both, cases, tokens)
            print(f"served: P/D {name}", flush=True)
        tight = small_pool_tokens(cases) * columns[COMBINED].token_bytes
        for way, more in preemption.FLAGS.items():
            small = alone((*flags, "--kv-cache-memory", str(tight), *more), stopping)
            columns[way] = serve_cases(runner, work / way, small, cases, tokens, at_once=True)
            counted = f"preemptions: {columns[way].preemptions}, pool: {tight:,} bytes"
            print(f"served: {way} ({counted})", flush=True)
    return columns


def _cell(case: FeatureCase, way: str, columns: Mapping[str, FeatureOutputs], decoder: ReferenceDecoder) -> Cell:
    stops = way in preemption.FLAGS
    meaningless = preemption.why_meaningless(case.prompts) if stops else None
    if meaningless is not None:
        return Cell(MEANINGLESS, meaningless)
    outcome = columns[way].outcomes.get(case.name, "not served")
    if isinstance(outcome, str):
        return Cell(WRONG, outcome)
    wrong = (
        _other_path(case, way, outcome)
        or case.judge(decoder, case.prompts, outcome)
        or _unlike_combined(case, outcome, columns)
        or (preemption.why_unproven(way, outcome) if stops else None)
    )
    return Cell(EQUAL) if wrong is None else Cell(WRONG, wrong)


def _other_path(case: FeatureCase, way: str, answers: Answers) -> str | None:
    expected = "handoff" if way.startswith("P/D") and case.prompts[0].pooling is None else None
    other = next((answer.path for answer in answers if expected and answer.path != expected), None)
    return None if other is None else f"its path was {other}, not {expected}"


def _unlike_combined(case: FeatureCase, answers: Answers, columns: Mapping[str, FeatureOutputs]) -> str | None:
    combined = columns[COMBINED].outcomes.get(case.name) if case.compared else None
    if isinstance(combined, list):
        for number, (ours, theirs) in enumerate(zip(answers, combined, strict=True)):
            if ours.sequences != theirs.sequences:
                return f"prompt {number}: {ours.sequences} in place of the combined instance's {theirs.sequences}"
    return None
