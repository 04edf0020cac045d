"""`pdserve bench`: finds what is to be measured."""

from collections.abc import Sequence

from wire.errors import ConfigError

HELP = """\
usage: pdserve bench engine [flags]

Measure what this machine gets out of the product.

  engine   prefill, decode and offline rates of one engine, beside the machine's floors and, if asked, beside vLLM

`pdserve bench engine --help` lists its flags.
"""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark. Raises ConfigError for one that there is not."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if argv[0] != "engine":
        raise ConfigError(f"there is no benchmark {argv[0]!r}, only `pdserve bench engine`")
    from pdserve.bench import engine

    return engine.main(argv[1:])
