"""The dictionaries of vllm-ascend's connectors: as its sources write them, and made by its own scheduler classes.

The classes are those of the wheel as data (tests/data_wheel.py): nothing of it is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from pdserve.run_folder import default_cache_dir
from scheduler.workers.answers import kv_transfer_params
from scheduler.workers.callbacks import Callback
from scheduler.workers.legs import WorkerRequest, asking, requests_of, ticket_of
from scheduler.workers.transfers import HeldKv
from tests.conftest import MISSING
from tests.data_wheel import NoWheel, wheel_in
from wire.types import PromptState, SamplingParams

VERSION = os.environ.get("PDSERVE_TEST_VLLM_ASCEND", "0.23.0")
CONNECTORS = "vllm_ascend/distributed/kv_transfer/kv_p2p/"
REFERENCE: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
    "remote_request_id": "cmpl-R-0-12345678", "remote_host": "127.0.0.1", "remote_port": 30000, "remote_pcp_size": 1,
    "remote_dcp_size": 1, "remote_ptp_size": 1, "last_token_id": 7, "remote_multi_nodes_meta_mapping": {},
    "num_prompt_blocks": 2, "remote_block_size": 4,
}  # fmt: skip
WANTED: dict[str, Any] = {
    "token_ids": [], "request_id": "cmpl-R-0", "do_remote_prefill": False, "do_remote_decode": True,
    "remote_block_ids": [[1, 2]], "remote_block_size": [4], "remote_engine_id": "e", "remote_host": "127.0.0.1",
    "remote_port": 30000, "remote_tp_size": 1, "remote_pcp_size": 1, "remote_dcp_size": 1, "remote_cached_tokens": 0,
}  # fmt: skip
URL = "http://127.0.0.1:9/x"


def test_a_reference_of_vllm_ascend_is_passed_on_unchanged() -> None:
    assert kv_transfer_params({"kv_transfer_params": REFERENCE}) == REFERENCE


@pytest.mark.anyio
async def test_what_a_layerwise_worker_wants_is_passed_on_unchanged() -> None:
    callback = Callback(URL, frozenset({"localhost"}))
    callback.take(orjson.dumps(WANTED))
    prompt = PromptState("a", "r", (1, 2, 3), SamplingParams(max_tokens=1), ())
    ticket = ticket_of(prompt, "decode-0", 1, [WorkerRequest("R", await callback.wait())], 20.0)
    assert requests_of(ticket) == [WorkerRequest("R", WANTED)]


@pytest.fixture
def package() -> Path:
    """The package with its connectors; its first use on a machine downloads 27 MB."""
    folder = default_cache_dir(os.environ) / "vllm-ascend"
    try:
        wheel = wheel_in(folder, os.environ, "vllm-ascend", VERSION, lambda name: name.startswith(CONNECTORS))
    except NoWheel as error:
        pytest.skip(f"{MISSING}: the vllm-ascend wheel: {error}")
    return wheel / "vllm_ascend"


@pytest.mark.long
def test_the_classes_of_vllm_ascend_make_and_take_these_dictionaries(package: Path) -> None:
    child = Path(__file__).with_name("ascend_connectors.py")
    given = json.dumps({"held": HeldKv().prefill_leg("R"), "asked": asking("R", URL).params})
    command = [sys.executable, "-P", str(child), str(package)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    layerwise, pull = found["layerwise"], found["pull"]

    assert (layerwise["url"], layerwise["wanted"]) == (URL, WANTED)
    assert layerwise["waits"] == [6, True]  # decode waits for the whole prompt, so no token comes before the KV
    assert layerwise["sends"] == ["cmpl-R-0-12345678"]
    assert layerwise["ended"] == [False, None]  # no reference, and no blocks held

    assert pull["reference"] == REFERENCE
    assert pull["stopped"] is None  # why a prefill leg must end by length
    assert pull["fetches"] == ["cmpl-R-0-12345678"]
