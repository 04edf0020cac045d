"""One table has every engine and server flag of vLLM 0.5 and 0.6."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from flags.options import EngineOptions
from pdserve.flags.row import Arity, FlagVerdict
from pdserve.flags.table import ROWS, find, nearest
from scheduler.config import SchedulerOptions

# Names, short names and numbers of values as declared in the source packages of vLLM 0.5.0, 0.5.3.post1, 0.5.5, 0.6.0,
# 0.6.2, 0.6.3.post1, 0.6.4.post1 and 0.6.6.post1: engine/arg_utils.py, entrypoints/openai/cli_args.py and
# entrypoints/api_server.py.
DECLARED = json.loads((Path(__file__).parent / "vllm_flags.json").read_text(encoding="utf-8"))
OURS = {
    "--" + field.name.replace("_", "-")
    for options in (EngineOptions, SchedulerOptions)
    for field in dataclasses.fields(options)
}
# The flags that section B of the checklist names, and the guide's own (A8).
NAMED = (
    "--served-model-name", "--host", "--port", "--model", "--max-num-seqs", "--max-model-len",
    "--max-num-batched-tokens", "--tensor-parallel-size", "--quantization", "--generation-config",
    "--override-generation-config", "--reasoning-parser", "--enable-auto-tool-choice", "--tool-call-parser",
    "--enable-request-id-headers", "--middleware", "--root-path", "--max-logprobs", "--enable-force-include-usage",
    "--enable-prompt-tokens-details", "--stream-interval", "--sse-keep-alive-interval",
    "--structured-outputs-config.backend", "--enable-server-load-tracking", "--enable-tokenizer-info-endpoint",
    "--shutdown-timeout", "--enable-scale-out", "--tokens-only", "--api-server-count",
)  # fmt: skip


@pytest.mark.covers("A10.145")
def test_every_vllm_flag_has_a_row_with_its_number_of_values() -> None:
    rows = {name: find(name) for name in DECLARED}
    arities = {name: row.arity for name, row in rows.items() if row}

    assert arities == {name: Arity(declared["takes"]) for name, declared in DECLARED.items()}
    assert [name for name in DECLARED if any(find(short) is not rows[name] for short in DECLARED[name]["short"])] == []


def test_every_flag_the_checklist_names_has_a_row() -> None:
    assert [name for name in NAMED if find(name) is None] == []


def test_no_flag_has_two_rows() -> None:
    names = Counter(name for row in ROWS for name in (row.name, row.short) if name)

    assert [name for name, count in names.items() if count > 1] == []


def test_a_row_is_supported_exactly_when_we_have_the_flag() -> None:
    ours = {row.name for row in ROWS if (row.our_name or row.name) in OURS}

    assert ours == {row.name for row in ROWS if row.verdict is FlagVerdict.SUPPORTED}


def test_a_flag_that_is_not_supported_has_its_reason() -> None:
    assert [row.name for row in ROWS if not row.why and row.verdict is not FlagVerdict.SUPPORTED] == []
    assert [row.name for row in ROWS if row.only and row.verdict is not FlagVerdict.NO_EFFECT] == []


def test_a_reason_fits_in_a_table_and_in_one_line() -> None:
    assert [row.name for row in ROWS if re.search(r"[|\n]", row.why)] == []


def test_underscores_are_dashes_as_in_vllm() -> None:
    row = find("--max_model_len")

    assert row is not None
    assert row.name == "--max-model-len"


def test_the_nearest_name_is_never_a_refused_one() -> None:
    assert nearest("--swap-spac", OURS) == ": did you mean --swap-space?"
    assert nearest("--middlewares", ()) != ": did you mean --middleware?"
    assert nearest("--zzzzzzzz", OURS) == ""
