"""A script that makes one LLM after another: the memory of a closed one returns to the system.

Only anonymous memory is compared: the share of mapped files depends on which other processes map them.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, save_tiny_tokenizer

ROUNDS = 20
DEADLINE_S = 900.0
_SCRIPT = """
import sys
from pathlib import Path
from pdserve import LLM, SamplingParams

for _ in range(int(sys.argv[2])):
    llm = LLM(sys.argv[1], dtype="float32", kv_cache_memory="64MiB")
    llm.generate(["the quick brown fox " * 20] * 8, SamplingParams(max_tokens=8), use_tqdm=False)
    llm.close()
    page = Path("/proc/self/smaps_rollup").read_text()
    print(next(line.split()[1] for line in page.splitlines() if line.startswith("Pss_Anon:")), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 100 MB, whose weights are of a size that the C library keeps for itself when they are freed."""
    folder = tmp_path_factory.mktemp("memory") / "llama"
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=MAX_MODEL_LEN,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.mark.long
@pytest.mark.timeout(DEADLINE_S)
def test_memory_is_flat_however_many_llms_a_script_makes(model: Path) -> None:
    command = [sys.executable, "-P", "-c", _SCRIPT, str(model), str(ROUNDS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)

    assert ended.returncode == 0, ended.stderr
    sizes = [int(line) for line in ended.stdout.split()]
    assert len(sizes) == ROUNDS
    assert max(sizes[3:]) <= 1.05 * sizes[2], sizes
