"""What `up` was given reaches its instances as the flags they know."""

import argparse
from pathlib import Path

import pytest

from flags.options import EngineOptions, Parser, add_flags, from_namespace
from pdserve.flags.parser import CommandParser
from pdserve.up_options import UpOptions
from pdserve.up_request import parse, to_flags
from pdserve.workers.up_flags import shared_flags, typed_args
from scheduler.config import SchedulerOptions
from wire.errors import ConfigError


@pytest.mark.parametrize(
    "typed",
    [
        ["--no-kv-digests"],
        ["--kv-digests", "--kv-links", "3"],
        ["--kv-transport", "tcp", "shm", "--kv-cache-memory", "1048576", "--block-size", "32"],
        ["--limit-mm-per-prompt", '{"image": 2}', "--default-chat-template-kwargs", '{"a": true}', "--ssl-cert-reqs=2"],
        ["--override-generation-config", '{"top_k": 4}', "--max-body-bytes=3MiB", "--allowed-methods", '["GET"]'],
    ],
)
def test_flags_round_trip(typed: list[str]) -> None:
    parser: argparse.ArgumentParser = Parser()
    for options in (EngineOptions, SchedulerOptions):
        add_flags(parser, options, None)
    namespace = parser.parse_args(typed)

    again = parser.parse_args(to_flags(namespace))

    for options in (EngineOptions, SchedulerOptions):
        assert from_namespace(options, again) == from_namespace(options, namespace)


def test_lists_are_passed_on_and_keys_are_on_no_command_line() -> None:
    parser: argparse.ArgumentParser = Parser()
    add_flags(parser, SchedulerOptions, "scheduler")
    namespace = parser.parse_args(["--allowed-origins", '["a","b"]', "--api-key", "sk-0123456789"])

    flags = to_flags(namespace)

    assert from_namespace(SchedulerOptions, parser.parse_args(flags)).allowed_origins == ("a", "b")
    assert "sk-0123456789" not in " ".join(flags)


def test_workers_get_the_flags_that_vllm_has_too() -> None:
    parser: argparse.ArgumentParser = Parser()
    add_flags(parser, EngineOptions, "engine")
    add_flags(parser, SchedulerOptions, "scheduler")
    typed = [
        "--connector=nixl-push",
        "--model",
        "/m",
        "--max-model-len",
        "64",
        "--no-enable-prefix-caching",
        "--host",
        "h",
        "--log-level",
        "DEBUG",
    ]

    flags = to_flags(shared_flags(parser.parse_args(typed)))

    assert flags == ("--model", "/m", "--max-model-len", "64", "--no-enable-prefix-caching", "--connector", "nixl-push")
    assert typed_args(UpOptions(worker_args="--seed 1 '-q=a b'")) == ("--seed", "1", "-q=a b")
    with pytest.raises(ConfigError, match="--worker-args"):
        typed_args(UpOptions(worker_args="'"))


@pytest.mark.parametrize("flag", ["--global-rank-table", "--node-ports", "--use-openai", "--http-port"])
def test_flags_that_up_sets_itself_are_refused_and_not_in_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is set by `pdserve up` itself"):
        parse([flag, "1"])
    with pytest.raises(SystemExit):
        parse(["--help"])

    out = capsys.readouterr().out
    assert "--kv-transport" in out
    assert flag not in out


@pytest.mark.parametrize(
    "flag", ["--model", "--host", "--served-model-name", "--run-dir", "--kv-transport", "--address"]
)
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_is_refused_and_no_default_used(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} '{value}' is empty, as from an unset variable: set"):
        parse([f"{flag}={value}"])


def test_a_second_prefill_worker_with_mooncake_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prefill 2 with --worker vllm --connector mooncake"):
        parse(["--worker=vllm", "--connector=mooncake", "--prefill=2", "--model=/m"])


def test_more_instances_than_one_up_starts_are_refused_with_the_limit() -> None:
    words = r"--prefill 99999 --decode 1: 100000 instances, but the limit of one machine is 64"
    with pytest.raises(ConfigError, match=words):
        parse(["--prefill", "99999", "--model", "/m"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ray",), "100000 instances, but the limit of one machine is 64: use fewer, or --address of a Ray cluster"),
        (("--ray", "--address", "10.0.0.18:6379"), "100000 instances, but the limit of one cluster is 1024: use fewer"),
    ],
)
def test_with_ray_there_is_a_limit_too(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--prefill 99999 --decode 1: {words}"):
        parse((*flags, "--prefill", "99999", "--model", "/m"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--address", "10.0.0.18:6379"), "is the address of a Ray cluster: set --ray too"),
        (("--ray", "--address", "ray://10.0.0.18:10001"), "Ray's client protocol is not supported"),
        (("--ray", "--ray-strategy", "near"), "invalid choice: 'near'"),
    ],
)
def test_ray_options_are_checked_before_anything_starts(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(flags)


def test_ray_options_are_only_for_up() -> None:
    request = parse(("--ray", "--address", "10.0.0.18:6379", "--ray-strategy", "pack", "--model", "/m"))

    assert (request.options.ray, request.options.address, request.options.ray_strategy) == (
        True, "10.0.0.18:6379", "pack",
    )  # fmt: skip
    assert request.flags == ("--model", "/m")


_RUNNING = "prefill-workers: [http://127.0.0.1:1]\ndecode-workers: [http://127.0.0.1:2, https://h]\n"


@pytest.mark.parametrize(("typed", "num_own"), [((), 1), (("--prefill=0", "--decode=0"), 0)])
def test_workers_that_run_already_are_named_in_the_file(typed: tuple[str, ...], num_own: int, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(_RUNNING)

    request = parse(["--config", str(tmp_path / "cluster.yaml"), "--model=/m", *typed])

    assert request.running.urls == ("http://127.0.0.1:1", "http://127.0.0.1:2", "https://h:443")
    assert (request.options.prefill, request.options.decode) == (num_own, num_own)
    assert request.flags == ("--model", "/m")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--decode-workers=h:1",), '--decode-workers h:1 must be "http://HOST:PORT"'),
        (
            ("--decode-workers=http://h:1", "--prefill=0", "--decode=0"),
            "use at least one of each, or none",
        ),
        (("--combined-workers=http://h:1", "--prefill=0"), "--prefill 0 --decode 1: use at least one of each"),
        (("--combined-workers=http://h:1", "--ray"), "--ray with running workers is not supported"),
        (("--prefill=0", "--decode=0"), "--prefill 0 --decode 0: use at least one of each"),
    ],
)
def test_workers_that_cannot_serve_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse((*flags, "--model=/m"))


@pytest.mark.parametrize("serves", [True, False])
def test_a_command_without_arguments_has_its_defaults(serves: bool) -> None:
    parser = CommandParser(serves=serves)
    add_flags(parser, UpOptions, "cluster")

    assert from_namespace(UpOptions, parser.parse_args([])) == UpOptions()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--schedulers", "0"), "--schedulers 0 is not in 1..16"),
        (("--schedulers", "17"), "--schedulers 17 is not in 1..16"),
        (("--schedulers", "2", "--port", "65534"), "the last scheduler's port is 65536, but the limit is 65535"),
        (("--schedulers", "2", "--responses-store", "s"), "--responses-store belongs to one scheduler"),
        (
            ("--schedulers", "2", "--connector", "ascend-layerwise", "--worker-callback", "127.0.0.1:7000"),
            "--worker-callback has one port",
        ),
    ],
)
def test_what_several_schedulers_cannot_have_is_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse((*flags, "--model", "/m"))


def test_several_schedulers_have_the_ports_after_the_shared_one() -> None:
    one, two = (parse(("--schedulers", number, "--port", "9100", "--model", "/m")) for number in "12")

    assert (one.base_url, one.scheduler_urls) == ("http://127.0.0.1:9100", ("http://127.0.0.1:9100",))
    assert two.scheduler_urls == ("http://127.0.0.1:9101", "http://127.0.0.1:9102")
    assert two.base_url == one.base_url
