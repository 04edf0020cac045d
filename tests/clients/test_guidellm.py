"""guidellm: a short benchmark of chats with two concurrent streams."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

if importlib.util.find_spec("guidellm") is None:
    pytest.skip("missing tool: guidellm (pip install 'pdserve[clients]')", allow_module_level=True)

NUM_REQUESTS, NUM_TOKENS = 6, 8


@pytest.mark.covers("B.clients.11")
def test_a_benchmark_counts_its_requests_and_their_tokens(pair: str, model: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [
        sys.executable, "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={pair},model=tiny",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={model}", "--output", f"kind=json,path={results}",
        "--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={NUM_TOKENS}", "--disable-console",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (benchmark,) = json.loads(results.read_text())["benchmarks"]
    totals = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert benchmark["metrics"]["request_totals"] == totals
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == NUM_TOKENS
        assert request["prompt_tokens"] >= 20
        assert request["time_to_first_token_ms"] > 0
