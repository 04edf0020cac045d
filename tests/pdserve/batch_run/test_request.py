"""The command line of `pdserve run-batch`, including vLLM's flags."""

from pathlib import Path

import pytest

from pdserve.batch_run.request import BatchRequest, parse
from wire.errors import ConfigError

ENDS = ("-i", "in.jsonl", "-o", "out.jsonl")
AT_URL = (*ENDS, "--base-url", "http://127.0.0.1:9000")


def parse_request(*typed: str, **environ: str) -> BatchRequest:
    return parse(typed, environ)


@pytest.mark.covers("A1.4")
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ((), "-i/--input-file, -o/--output-file"),
        (("-i", "a"), "-o/--output-file"),
        (("-o", "a"), "-i/--input-file"),
        ((*ENDS, "--max-inflight", "0"), "--max-inflight 0 is out of range"),
        ((*ENDS, "--max-inflight", "70000"), "--max-inflight 70000 is above 65536"),
        ((*ENDS, "--request-timeout", "0"), "--request-timeout 0 is out of range: use a number of seconds above 0"),
        (
            (*ENDS, "--request-timeout", "nan"),
            "--request-timeout nan is out of range: use a number of seconds above 0",
        ),
        ((*ENDS, "--max-line-bytes", "0"), "--max-line-bytes 0 is out of range"),
        ((*ENDS, "--metrics-port", "70000"), "70000, is not in 1..65535"),
        ((*ENDS, "--max-infligth", "3"), "did you mean --max-inflight?"),
        ((*ENDS, "--model", " "), "--model ' ' is empty"),
        ((*ENDS, "--global-rank-table", "t.json"), "--global-rank-table is for instances of a cluster"),
        ((*ENDS, "--lora-modules", "a"), "--lora-modules is refused: adapters are not supported"),
        ((*AT_URL, "--dtype", "float32"), "--dtype is set by the server at --base-url"),
        ((*AT_URL, "--max-logprobs", "3"), "--max-logprobs is set by the server at --base-url"),
    ],
)
def test_what_is_wrong_is_refused_with_a_reason(typed: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_request(*typed)

    assert words in str(caught.value)


@pytest.mark.covers("A1.2")
def test_long_and_short_flags_mean_the_same() -> None:
    short = parse_request(*ENDS, "--model", "m")
    long = parse_request("--input-file", "in.jsonl", "--output-file=out.jsonl", "--model=m")

    assert (short.input_file, short.output_file, short.engine) == (long.input_file, long.output_file, long.engine)


@pytest.mark.covers("A1.17")
def test_a_model_flag_printed_twice_is_one() -> None:
    assert parse_request(*ENDS, "--model", "--model", "a/b").engine.model == "a/b"


def test_a_file_for_every_command_works_for_this_one(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: m\nport: 9000\nprefill: 2\nshare-devices: true\nmax-inflight: 7\ndtype: float32\n")

    reported = parse_request(*ENDS, "--config", str(file))
    at_url = parse_request(*AT_URL, "--config", str(file))

    assert (reported.engine.model, reported.engine.dtype, reported.max_inflight) == ("m", "float32", 7)
    assert (reported.engine.share_devices, reported.metrics, at_url.max_inflight) == (False, None, 7)


@pytest.mark.parametrize(
    ("typed", "seconds"), [(ENDS, 86_400), (AT_URL, 3600), ((*AT_URL, "--request-timeout", "2.5"), 2.5)]
)
def test_a_line_may_take_an_hour_on_a_server(typed: tuple[str, ...], seconds: float) -> None:
    assert parse_request(*typed).request_timeout_s == seconds


def test_a_key_comes_from_the_flag_the_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\nother\n")

    assert parse_request(*AT_URL).api_key is None
    assert parse_request(*AT_URL, VLLM_API_KEY="theirs").api_key == "theirs"
    assert parse_request(*AT_URL, VLLM_API_KEY="theirs", PDSERVE_API_KEY="ours").api_key == "ours"
    assert parse_request(*AT_URL, "--api-key-file", str(file), PDSERVE_API_KEY="ours").api_key == "from-file"
    assert parse_request(*AT_URL, "--api-key", "sk-typed", PDSERVE_API_KEY="ours").api_key == "sk-typed"
    assert "sk-typed" not in repr(parse_request(*AT_URL, "--api-key", "sk-typed"))
    with pytest.raises(ConfigError, match="a key of 3 characters is invalid"):
        parse_request(*AT_URL, "--api-key", "a b")


def test_the_in_process_model_needs_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    reported = parse_request(*ENDS, "--api-key", "k", "--ssl-keyfile", "f", VLLM_API_KEY="v")

    assert (reported.api_key, reported.scheduler.api_key, reported.scheduler.ssl_keyfile) == (None, (), None)
    assert "without effect: --api-key (no HTTP server runs here); --ssl-keyfile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "where"),
    [
        ((), None),
        (("--metrics-port", "9100"), ("127.0.0.1", 9100)),
        (("--enable-metrics",), ("127.0.0.1", 8000)),
        (("--enable-metrics", "--host", "10.0.0.1", "--port", "81"), ("10.0.0.1", 81)),
        (("--enable-metrics", "--url", "0.0.0.0"), ("0.0.0.0", 8000)),
    ],
)
def test_metrics_are_served_on_the_port_of_vllms_flags(typed: tuple[str, ...], where: tuple[str, int] | None) -> None:
    assert parse_request(*ENDS, *typed).metrics == where


def test_a_metrics_address_without_metrics_prints_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    parse_request(*ENDS, "--port", "8000", "--url", "127.0.0.1")

    message = "without effect: --url, --port (metrics are served only with --metrics-port or --enable-metrics)\n"
    assert capsys.readouterr().err == message


def test_answers_depend_on_the_model_and_not_on_the_engines_sizes() -> None:
    first = parse_request(
        *ENDS, "--model", "m", "--dtype", "float32", "--max-num-seqs", "4", "--port", "1"
    ).answer_settings

    assert first == {"--model": "m", "--dtype": "float32"}
    assert parse_request(*ENDS, "--model", "m", "--dtype", "float32").answer_settings == first
    assert parse_request(*ENDS, "--model", "n", "--dtype", "float32").answer_settings != first
    assert (
        parse_request(*AT_URL).answer_settings
        == parse_request(*ENDS, "--base-url", "http://moved:1").answer_settings
        == {"--base-url": "a server"}
    )


def test_the_in_process_queue_takes_all_concurrent_requests() -> None:
    wide = parse_request(*ENDS, "--max-inflight", "20000").scheduler
    typed = parse_request(*ENDS, "--max-queued-requests", "7", "--first-token-timeout", "5").scheduler

    assert wide.max_queued_requests >= 20_000
    assert wide.max_queued_tokens >= 20_000 * 2**20
    assert wide.first_token_timeout == 86_400
    assert (typed.max_queued_requests, typed.first_token_timeout) == (7, 5)
