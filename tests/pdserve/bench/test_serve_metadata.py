"""A result describes its run by vLLM's keys, in a file with a valid name."""

from datetime import datetime

import pytest

from pdserve.bench.serve_metadata import about, file_name
from pdserve.bench.serve_options import parse

NOW = datetime(2026, 3, 4, 5, 6, 7)
# The keys of a run in `vllm bench serve` of vLLM 0.32, apart from measurements.
VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency",
}  # fmt: skip


def test_the_run_is_reported_under_vllms_keys() -> None:
    found = about(parse(["--num-prompts", "5", "--request-rate", "2.5", "--metadata", "tp=2"]), "org/m", NOW)

    assert set(found) == VLLM_KEYS | {"base_url", "seed", "tp"}
    assert (found["date"], found["model_id"], found["tokenizer_id"]) == ("20260304-050607", "org/m", "org/m")
    assert (found["request_rate"], found["max_concurrency"], found["tp"]) == (2.5, None, "2")
    assert about(parse([]), "m", NOW)["request_rate"] == "inf"


@pytest.mark.parametrize(
    ("argv", "model", "name"),
    [
        ([], "org/m-1.5", "openai-infqps-m-1.5-20260304-050607.json"),
        (["--max-concurrency", "8", "--label", "l"], "m", "l-infqps-concurrency8-m-20260304-050607.json"),
        (["--request-rate", "2"], "a b:c", "openai-2.0qps-a_b_c-20260304-050607.json"),
        (["--result-filename", "x.json"], "m", "x.json"),
    ],
)
def test_the_file_is_named_as_by_vllm(argv: list[str], model: str, name: str) -> None:
    assert file_name(parse(argv), model, NOW) == name
