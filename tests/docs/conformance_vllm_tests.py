"""The part of docs/conformance.md about vLLM's own tests of its server, from their record."""

from collections import Counter
from collections.abc import Iterator

from tests.vllm_server_tests.files import FILES
from tests.vllm_server_tests.files_left_out import LEFT_OUT
from tests.vllm_server_tests.sdist import VERSION

_HEAD = """
## vLLM's server tests

The tests of vLLM {version} that start its server (folder `entrypoints` of the tests in its sdist, which is downloaded,
and not a part of this repository), run against `pdserve up` with a P and a D, by `scripts/test --all=vllm-tests`:
**{passed} of {ran} pass** ({share:.0%}). A file that reads the metrics of one engine runs against `pdserve serve`
instead, as the last column says. The tests are unchanged; what they import from vLLM is replaced
([tests/vllm_server_tests][vllm-tests]): their server is ours, with a model and images that are made here, and the flags
for adapters are taken off. A test that needs what one model answers, or its vocabulary, is left out: {left_out}
of these files. A run that differs from this record fails, also where a test passes that is on record as a failure.

[vllm-tests]: ../tests/vllm_server_tests

| file | passed | failed | left out | ways |
|---|---|---|---|---|
"""


def vllm_tests() -> Iterator[str]:
    """Yield the text."""
    passed, failed = sum(row.passed for row in FILES.values()), sum(len(row.failing) for row in FILES.values())
    left_out, share = sum(row.num_left_out for row in FILES.values()), passed / (passed + failed)
    yield _HEAD.format(version=VERSION, passed=passed, ran=passed + failed, share=share, left_out=left_out)
    for file, row in FILES.items():
        yield f"| `{file}` | {row.passed} | {len(row.failing)} | {row.num_left_out} | {', '.join(row.ways)} |\n"
    yield "\nThese fail:\n\n| tests | why | which |\n|---|---|---|\n"
    reasons = Counter(reason for row in FILES.values() for reason in row.failing.values())
    for reason, count in reasons.most_common():
        names = {name.partition("[")[0] for row in FILES.values() for name, why in row.failing.items() if why == reason}
        yield f"| {count} | {reason} | {', '.join(f'`{name}`' for name in sorted(names))} |\n"
    yield "\nThese do not run:\n\n| files or tests | why |\n|---|---|\n"
    for file, row in FILES.items():
        for prefix, why in row.left_out.items():
            yield f"| `{prefix}` in `{file}` | {why} |\n"
    for why, files in LEFT_OUT.items():
        yield f"| {len(files)} files: {', '.join(f'`{file}`' for file in files)} | {why} |\n"
