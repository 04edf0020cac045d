"""The `pdserve` command: finds the subcommand, imports only that, and turns errors into one line and an exit status.

Slow imports happen inside `guarded`, where Ctrl-C is already handled.
"""
# PYTHON_ARGCOMPLETE_OK

import os
import sys
from collections.abc import Callable, Sequence

from pdserve import __version__
from pdserve.guarded import guarded
from pdserve.tab_completion import VARIABLE, complete_command

COMMANDS = {
    "up": "start a scheduler and its prefill and decode instances on this machine",
    "down": "stop what `up` started",
    "status": "show the instances of the running cluster",
    "links": "measure the KV link of every prefill-decode pair, and explain why no better transport is in use",
    "role": "use a running instance for prefill, decode or both, without a restart",
    "logs": "show or follow the logs of the cluster's processes",
    "door": "serve the API of running schedulers, and go on with each stream when its scheduler dies",
    "route": "serve from running vLLM workers: prefill on one, decode on another",
    "serve": "serve one model from one process (the combined instance)",
    "run-batch": "answer a file of requests in OpenAI's batch format, and resume where it stopped",
    "chat": "chat with a served model, here or elsewhere",
    "complete": "have a served model continue texts",
    "verify": "prove that P/D, combined and transformers give the same tokens",
    "bench": "measure a server under load, P/D against colocated instances, or an engine against its machine's limits",
    "plan": "measure a server, then predict which layout of such servers is best for a load",
    "simulate": "predict how 1P1D, 2P1D, ... or combined instances would serve a load, and which layout is best",
    "selftest": "test every op, link and serving mode on this machine's device, and write a report",
    "collect-env": "print facts about this machine and its cluster for a bug report, without secrets",
    "model": "print the folder of a model, downloading or converting it if needed",
}

HELP = """\
usage: pdserve COMMAND [flags]

Serve a language model with prefill and decode on separate instances.

commands:
{commands}

A cluster on this machine, with the default model:
  pdserve up --detach
  curl http://127.0.0.1:9000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{{"model": "SmolLM2-135M-Instruct", "messages": [{{"role": "user", "content": "Hello"}}]}}'
  pdserve status
  pdserve down

Two prefill and two decode instances of your own model:
  pdserve up --prefill 2 --decode 2 --model ~/models/Qwen3-0.6B --dtype bfloat16

Over several machines: `ranktable gen --help` and deploy/PD_separate/start_servers.sh.

`pdserve COMMAND --help` lists a command's flags; --config FILE reads them from YAML. --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 failure, 2 wrong input, 130 interrupted."""
    if VARIABLE in os.environ:
        from pdserve.bench.command import BENCHMARKS

        complete_command(COMMANDS, BENCHMARKS, _run)
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(_signature(arguments), lambda: _command(arguments))


def _signature(arguments: Sequence[str]) -> str:
    """Return the prefix of error messages: the command, and for `bench` the benchmark too."""
    is_benchmark = arguments[:1] == ["bench"] and len(arguments) > 1 and arguments[1].isalpha()
    return " ".join(("pdserve", *arguments[: 2 if is_benchmark else 1]))


def _command(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<11} {what}" for name, what in COMMANDS.items())
        print(HELP.format(commands=commands), end="")
        return 0
    if arguments[0] == "--version":
        print(f"pdserve {__version__}")
        return 0
    return _run(arguments[0], arguments[1:])


def _run(command: str, arguments: Sequence[str]) -> int:
    import difflib
    import importlib

    from wire.errors import ConfigError

    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        advice = f"did you mean `pdserve {near[0]}`?" if near else "`pdserve --help` lists them"
        raise ConfigError(f"there is no such command; {advice}")
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"pdserve.{command.replace('-', '_')}").main
    return run(arguments)
