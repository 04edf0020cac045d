"""The guide's lines as it prints them; only a masked address is filled in (10.**.**.18 is 10.0.0.18)."""

from collections.abc import Mapping
from typing import Final

GEN: Final = (
    "python ${LLM_TOOLS_PATH}/PD_separate/pd_ranktable_tools.py --mode gen --prefill-server-list 4,5 "
    "--decode-server-list 6,7 --api-server --save-dir ./save_dir"
)
MERGE: Final = (
    "python ${LLM_TOOLS_PATH}/PD_separate/pd_ranktable_tools.py --mode merge --global-ranktable-list "
    "./ranktable/global_ranktable_10.0.0.18.json ./ranktable/global_ranktable_10.0.0.19.json --save-dir ./save_dir"
)
BUILD: Final = (
    "cd ./AscendCloud/AscendCloud-LLM/llm_inference/ascend_vllm/ && "
    "sh build_image.sh --base-image=${base_image} --image-name=${image_name}"
)
PORTS: Final[Mapping[str, int]] = {"45": 8088, "67": 8089, "host": 9000}
"""By the end of the local table's name: prefill, decode, scheduler."""


def start(end: str) -> str:
    """Return the block that starts the process of local_rank_table_10.0.0.18_<end>.json, exports and all.

    The name of the local table is the guide's own slip (its tool writes local_ranktable_...), and so is
    ${served-model-name}, by which a shell means `model-name` as long as no variable `served` is set.
    """
    return (
        "export GLOBAL_RANK_TABLE_FILE_PATH=global_ranktable_10.0.0.18.json\n"
        f"export RANK_TABLE_FILE_PATH=local_rank_table_10.0.0.18_{end}.json\n"
        "export NODE_PORTS=8088,8089\n"
        "export USE_OPENAI=1\n"
        "sh AscendCloud-LLM/llm_tools/PD_separate/start_servers.sh \\\n"
        "    --model=${model} \\\n"
        "    --tensor-parallel-size=2 \\\n"
        "    --max-model-len=4096 \\\n"
        "    --max-num-seqs=256 \\\n"
        "    --max-num-batched-tokens=4096 \\\n"
        "    --host=0.0.0.0 \\\n"
        f"    --port={PORTS[end]} \\\n"
        "    --served-model-name ${served-model-name}\n"
    )
