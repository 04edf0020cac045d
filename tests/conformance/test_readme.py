"""The examples with the official client in README.md run as printed; README.zh-CN.md has the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_REPORT = """
print()
roles = [dict(message)["role"] for message in question]
city = json.loads(call.function.arguments)["city"]
print(json.dumps([call.function.name, city, roles, answer.choices[0].finish_reason]))
"""


def _examples(page: str) -> list[str]:
    """Return the page's examples from the client's creation on; each uses the names of those before it.

    That of an image needs a vision model: tests/cluster/test_image_chats.py.
    """
    blocks = _PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))
    return [block for block in blocks if "client" in block and "image_url" not in block]


def test_both_pages_show_a_stream_a_tool_call_and_an_agent_loop() -> None:
    _, call, agent = _examples("README.md")

    assert _examples("README.zh-CN.md") == _examples("README.md")
    assert 'tool_choice="required"' in call
    assert len([line for line in agent.splitlines() if line and not line.startswith("import ")]) == 10


@pytest.mark.covers("B.clients.1")
def test_the_examples_call_a_tool_and_answer_with_its_result(pair: str) -> None:
    code = "\nprint()\n".join(_examples("README.md"))
    for printed, here in (("http://127.0.0.1:9000", pair), ("SmolLM2-135M-Instruct", "tiny")):
        assert printed in code
        code = code.replace(printed, here)
    code += _REPORT
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr[-3000:]
    called, city, roles, finish_reason = json.loads(ended.stdout.splitlines()[-1])
    assert (called, roles) == ("weather", ["user", "assistant", "tool"])
    assert city in ("Paris", "Rome")
    assert finish_reason in ("stop", "length")
