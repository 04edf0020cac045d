"""Real processes with different numbers of ranks, by the tables' device lists; the tokens prove every head."""

import json
import zlib
from pathlib import Path

import pytest

from ranktable_tools.launch_plan import resolve
from testing.engine.fake_model import FakeConfig, expected_tokens
from tests.cluster.guide import GuideCluster
from tests.faults.cluster import VOCAB_SIZE, make_model
from wire.types import SamplingParams

pytestmark = pytest.mark.cluster

KV = ((0, "k", 3, 64), (0, "v", 3, 64), (1, "latent", 1, 576))
PROMPT = tuple(range(40, 140))


def salt(cluster: GuideCluster, name: str) -> int:
    own = resolve(cluster.environment(name)).own
    return zlib.crc32(f"{own.server_ip}|{own.device_ids}".encode())


@pytest.mark.long
def test_two_ranks_prefill_and_one_decodes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "fake.json").write_text(json.dumps({"kv_tensors": KV, "num_layers": 3}))
    flags = ("--engine=fake", "--prefill-chunk-size=48", "--log-level=DEBUG")
    with GuideCluster(tmp_path, model, prefill=("0,1",), decode=("2",), flags=flags) as cluster:
        cluster.up()

        prompt = " ".join(f"w{token}" for token in PROMPT)
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        reply = cluster.client.post("/v1/completions", {"model": "tiny", **body})
        assert reply.status == 200, reply.body
        cluster.wait_idle()

        fake, params = FakeConfig(vocab_size=VOCAB_SIZE, kv_tensors=KV), SamplingParams(12, temperature=0)
        salts = [salt(cluster, "prefill-0")] * len(PROMPT) + [salt(cluster, "decode-0")]
        wanted = expected_tokens(fake, PROMPT, params, count=12, salts=salts)
        assert reply.json()["choices"][0]["text"].split() == [f"w{token}" for token in wanted]
        assert cluster.processes["prefill-0"].log.count("kv_link_up") == 2
