"""The flags of `pdserve bench serve`, and what is refused with a message."""

import math
import re
import shlex

import pytest

from pdserve.bench.serve_options import parse
from pdserve.bench.serve_vllm_flags import REFUSED
from wire.errors import ConfigError


def test_the_defaults_are_our_cluster_and_vllms_load() -> None:
    options = parse([])

    assert options.url == "http://127.0.0.1:9000"
    assert (options.num_prompts, options.random_input_len, options.random_output_len) == (1000, 1024, 128)
    assert options.request_rate == math.inf
    assert options.metric_percentiles == (50.0, 90.0, 99.0)
    assert options.metrics == ("ttft", "tpot", "itl", "e2el", "longest_gap")
    assert parse(["--backend", "openai-embeddings"]).metrics == ("e2el",)


@pytest.mark.parametrize(
    ("argv", "url"),
    [
        (["--base-url", "http://a:1/v1/"], "http://a:1"),
        (["--host", "::1", "--port", "8000"], "http://[::1]:8000"),
        (["--base-url", "https://a/openai"], "https://a/openai"),
    ],
)
def test_base_urls_are_accepted_as_clients_write_them(argv: list[str], url: str) -> None:
    assert parse(argv).url == url


def test_a_password_in_the_url_becomes_a_header_and_stays_hidden() -> None:
    options = parse(["--base-url", "https://me:p%40ss@a:1/v1"])

    assert options.url == "https://a:1"
    assert options.headers == {"Authorization": "Basic bWU6cEBzcw=="}
    assert parse(["--base-url", "http://me:p@a", "--header", "authorization=Bearer x"]).headers == {
        "authorization": "Bearer x"
    }
    with pytest.raises(ConfigError, match=r"^--base-url a:1: it must begin with http"):
        parse(["--base-url", "me:pass@a:1"])
    with pytest.raises(ConfigError, match="--base-url has a query"):
        parse(["--base-url", "http://a:1?key=pass"])


def test_a_command_line_of_vllm_is_accepted() -> None:
    line = (
        "--backend vllm --model m --tokenizer t --dataset-name random --input-len 8 --output-len 4 --num-prompts 5 "
        "--request-rate 2.5 --burstiness 0.5 --max-concurrency 3 --ignore-eos --goodput ttft:200 tpot:50 "
        "--percentile-metrics ttft,e2el --metric-percentiles 25,99.9 --header A=b C=d=e --header F=g,h "
        "--metadata run=1 --save-result --save-detailed --result-dir r --result-filename f.json --seed 9"
    )

    options = parse(shlex.split(line))

    assert options.goals == {"ttft": 200.0, "tpot": 50.0}
    assert options.percentile_metrics == ("ttft", "e2el")
    assert options.metric_percentiles == (25.0, 99.9)
    assert options.headers == {"A": "b", "C": "d=e", "F": "g,h"}
    assert "d=e" not in repr(options)


def test_vllms_sampling_flags_are_fields_of_every_request() -> None:
    flags = "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --presence-penalty 1 --repetition-penalty 1.1"
    reported = parse(shlex.split(f"{flags} --frequency-penalty -1 --logprobs 3 --ignore-eos"))
    chat = parse(["--backend", "openai-chat", "--logprobs", "3"])

    assert reported.sampling_fields == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": -1.0, "presence_penalty": 1.0,
        "repetition_penalty": 1.1, "ignore_eos": True, "logprobs": 3,
    }  # fmt: skip
    assert chat.sampling_fields == {"temperature": 0.0, "logprobs": True, "top_logprobs": 3}
    assert parse([]).sampling_fields == {"temperature": 0.0}


def test_requests_use_the_served_name_and_results_the_models() -> None:
    options = parse(["--model", "org/m", "--served-model-name", "tiny"])

    assert (options.requested_model, options.model) == ("tiny", "org/m")
    assert parse(["--model", "org/m"]).requested_model == "org/m"


def test_vllms_flags_without_effect_are_named_without_values(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(shlex.split("--trust-remote-code --tokenizer_mode auto --request-id-prefix=x- --num-prompts 7"))

    assert options.num_prompts == 7
    reported = capsys.readouterr().err
    assert reported.startswith(
        "without effect: --trust-remote-code (prompts are made without a tokenizer); --tokenizer-mode ("
    )
    assert reported.count("\n") == 1


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_vllm_flags_are_refused_with_advice(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name} is not supported: {REFUSED[name]}")):
        parse([f"{name}=1"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-prompts", "0"], "--num-prompts 0: must be at least 1"),
        (["--max-concurrency", "0"], "--max-concurrency 0: must be at least 1"),
        (["--request-timeout", "0"], "--request-timeout 0: must be at least 1"),
        (["--goodput", "ttft"], "--goodput ttft: write NAME:MILLISECONDS"),
        (["--goodput", "speed:3"], "--goodput speed:3: NAME must be one of ttft"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics speed: choose from ttft"),
        (["--metric-percentiles", "101"], "percentiles must be from 0 to 100"),
        (["--metric-percentiles", "x"], "is not a list of percentiles"),
        (["--dataset-name", "custom"], "it needs --dataset-path FILE"),
        (["--dataset-path", "f"], "random prompts need no --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "no/f"], "--dataset-path no/f does not exist"),
        (["--random-input-len", "0"], "--random-input-len 0 .*: these must be at least 1, 1 and 0"),
        (["--random-range-ratio", "1"], "--random-range-ratio 1 is not in"),
        (["--port", "99999"], "http://127.0.0.1:99999: the port is not a number from 1 to 65535"),
        (["--base-url", "http://h:x"], "http://h:x: the port is not a number from 1 to 65535"),
        (["--plot", "f.jpg"], "--plot f.jpg: use a file that ends in .svg or .png"),
        (["--base-url", "localhost:9000"], "--base-url localhost:9000: it must begin with http"),
        (["--backend", "openai-embeddings", "--goodput", "ttft:9"], "vectors have no ttft, only e2el"),
        (["--backend", "openai-embeddings", "--percentile-metrics", "itl,e2el"], "vectors have no itl, only e2el"),
        (["--extra-body", "{"], "--extra-body {: invalid JSON"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--header", "x"], "--header takes KEY=VALUE"),
        (["--requests-rate", "3"], "did you mean --request-rate"),
    ],
)
def test_mistakes_are_refused_with_a_reason(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(argv)


def test_a_plot_without_matplotlib_is_refused_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    for name in ("f.png", "f.svg"):
        with pytest.raises(ConfigError, match=r"--plot needs matplotlib: pip install 'pdserve\[plot\]'"):
            parse(["--plot", name])
