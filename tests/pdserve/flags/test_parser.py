"""Flags override the environment, and that the file, on every command."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve import cli, serve, up_request
from pdserve.flags.parser import CommandParser, prepare, take_config
from pdserve.instance_flags import parse_instance_flags
from pdserve.launch import read_flags, table_variables
from scheduler.config import parser as scheduler_parser
from wire.errors import ConfigError

VARIABLES = {"GLOBAL_RANK_TABLE_FILE_PATH": "/env/table.json", "NODE_PORTS": "1,2"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


def test_a_flag_overrides_the_file(file: Path) -> None:
    file.write_text("max-num-seqs: 4\nkv-links: 3\nserved-model-name: [a, b]\nkv_digests: false\n")

    typed = parse_instance_flags(["--kv-links=5", "--config", str(file)], {})

    assert (typed.options.kv_links, typed.options.max_num_seqs) == (5, 4)
    assert typed.options.served_model_name == ("a", "b")
    assert not typed.options.kv_digests


def test_the_environment_overrides_the_file_and_a_flag_both(file: Path) -> None:
    file.write_text("global-rank-table: /file/table.json\nnode-ports: 3,4\n")

    def variables(*argv: str, environ: Mapping[str, str]) -> dict[str, str]:
        return table_variables(read_flags(argv, environ), environ)

    assert variables("--config", str(file), environ={}) == {
        "GLOBAL_RANK_TABLE_FILE_PATH": "/file/table.json", "NODE_PORTS": "3,4",
    }  # fmt: skip
    assert variables(f"--config={file}", environ=VARIABLES) == VARIABLES
    assert variables("--config", str(file), "--node-ports", "5,6", environ=VARIABLES)["NODE_PORTS"] == "5,6"


def test_up_reads_the_clusters_shape_from_the_file(file: Path, model: str) -> None:
    file.write_text(f"model: {model}\nprefill: 2\ndetach: yes\nport: 9100\nhttp-port: 9200\nmax-n: 3\n")

    request = up_request.parse(["--config", str(file), "--decode", "3"])

    assert (request.options.prefill, request.options.decode, request.options.detach) == (2, 3, True)
    assert (request.engine.port, request.engine.http_port) == (9100, None)
    assert request.flags[-2:] == ("--max-n", "3")


def test_a_model_given_to_serve_overrides_the_files(file: Path, model: str) -> None:
    file.write_text("model: /of/the/file\nserved-model-name: [a, b]\n")

    config = serve.parse(["--config", str(file), model])

    assert config.engine.model == model
    assert config.engine.served_model_name == ("a", "b")
    with pytest.raises(ConfigError, match="the model is given twice"):
        serve.parse(["--config", str(file), model, "--model", "other"])


def test_up_refuses_an_instances_own_address(file: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"--ip 10.0.0.1 is for an instance of a ranktable"):
        serve.parse([model, "--ip=10.0.0.1"])
    with pytest.raises(ConfigError, match=r"--share-devices is for the instances of a ranktable"):
        serve.parse([model, "--share-devices"])
    with pytest.raises(ConfigError, match=r"--kv-ip is set by `pdserve up` itself"):
        up_request.parse(["--model", model, "--kv-ip=10.0.0.1"])
    with pytest.raises(ConfigError, match=r"--share-devices is set by `pdserve up` itself"):
        up_request.parse(["--model", model, "--share-devices"])
    file.write_text("ip: 10.0.0.1\nshare-devices: yes\n")
    assert serve.parse([model, "--config", str(file)]).engine.model == model


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "bench"])
def test_every_command_takes_a_file_and_refuses_unknown_keys(
    file: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("model: /m\nprefill: 2\n# a comment\nmax-modl-len: 5\n")
    words = ["path"] if command == "model" else []

    status = cli.main([command, *words, "--config", str(file)])

    assert status == 2
    assert f"{file}:4: unknown key 'max-modl-len': did you mean max-model-len?" in capsys.readouterr().err


def test_bench_engine_takes_a_file_too(file: Path) -> None:
    file.write_text("repeats: 7\nport: 9000\n")
    engine = importlib.import_module("pdserve.bench.engine")

    assert engine.parse(["--config", str(file)]).repeats == 7


def test_one_file_serves_commands_that_know_only_part_of_it(file: Path) -> None:
    file.write_text("model: /m\nprefill: 2\nurl: http://h:1\nuse-v2-block-manager: true\napi-key: secret\n")
    parser = CommandParser(prog="x")
    parser.add_argument("--url")

    namespace = parser.parse_args(["--config", str(file)])

    assert vars(namespace) == {"url": "http://h:1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: abc", r":1: port: 'abc' is not a valid value"),
        ("kv-cache-memory: lots", r":1: kv-cache-memory: 'lots' is not a size"),
        ("device: tpu", r":1: device: 'tpu' is not one of auto, cpu"),
        ("kv-digests: 1", r":1: kv-digests must be true or false, not '1'"),
        ("port: [1, 2]", r":1: port takes one value, not a list"),
        ("config: other.yaml", r":1: unknown key 'config': it is allowed only on the command line"),
        ("help: true", r":1: unknown key 'help': it is allowed only on the command line"),
        ("model: m\nmiddleware: s", r":2: --middleware is refused"),
        ("model: m\n\nkv-cache-dtype: fp8", r":3: --kv-cache-dtype fp8 is refused"),
        ("enforce-eager: 3", r":1: enforce-eager must be true or false"),
        ("no-kv-digests: true", r":1: unknown key 'no-kv-digests': write `kv-digests: false`"),
    ],
)
def test_a_bad_value_is_refused_with_its_line(file: Path, text: str, words: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError, match=words):
        parse_instance_flags(["--config", str(file)], {})


def test_vllms_flags_are_keys_too(file: Path) -> None:
    file.write_text(
        "swap-space: 1\ndtype: half\nuse-v2-block-manager: true\nenforce-eager: yes\nseed: 3\ntrust-remote-code: no\n"
    )

    typed = parse_instance_flags(["--config", str(file), "--seed", "4"], {})

    assert (typed.options.swap_bytes, typed.options.dtype, typed.options.enforce_eager) == (2**30, "float16", True)
    assert len(typed.notices) == 1
    assert typed.notices[0].count("--seed") == 1
    assert "trust-remote-code" not in typed.notices[0]


def test_serve_and_up_print_notices_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    serve.parse([model, "--use-v2-block-manager", "--seed", "1"])
    request = up_request.parse(["--model", model, "--use-v2-block-manager", "--swap-space", "1"])

    assert [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "without effect: --use-v2-block-manager"
    ] * 2
    assert request.flags == ("--model", model, "--swap-bytes", str(2**30))
    for parse in (serve.parse, up_request.parse):
        with pytest.raises(ConfigError, match=r"^--lora-modules is refused"):
            parse(["--model", model, "--lora-modules", "a=b"])


def test_typed_flags_override_vllm_flags_in_the_file(file: Path) -> None:
    file.write_text("swap-space: 1\n")

    assert parse_instance_flags(["--config", str(file), "--swap-bytes", "5"], {}).options.swap_bytes == 5


def test_http_flags_print_one_notice_on_an_instance(file: Path) -> None:
    file.write_text("max-queued-requests: 5\n")

    typed = parse_instance_flags(["--chat-template", "t", "--startup-timeout=3", "--config", str(file)], {})

    assert typed.notices == (
        "without effect on an instance: --chat-template, --startup-timeout (the scheduler serves the API)",
    )


def test_config_is_given_once_and_with_a_name() -> None:
    assert take_config(["a", "--config=f", "b"]) == ("f", ("a", "b"))
    assert take_config(["--", "--config", "f"]) == (None, ("--", "--config", "f"))
    with pytest.raises(ConfigError, match="--config has no value"):
        take_config(["--config"])
    with pytest.raises(ConfigError, match="--config is given 2 times: a, b"):
        take_config(["--config", "a", "--config=b"])


def test_the_schedulers_own_command_takes_a_file(file: Path) -> None:
    file.write_text("model: /m\nmax-n: 3\n")

    prepared = prepare(["--config", str(file), "--use-v2-block-manager"], scheduler_parser(), {}, serves=True)

    assert prepared.argv == ("--model=/m", "--max-n=3")
    assert prepared.notice == "without effect: --use-v2-block-manager (there is one kind of KV pool)"


def test_a_model_flag_printed_twice_is_reported_once() -> None:
    parser = CommandParser(serves=True, prog="x")
    parser.add_argument("--model")

    assert parser.parse_args(["--model", "--model", "a/b"]).model == "a/b"
