"""The files of vLLM's `tests/entrypoints` that run here, and what their tests do: the record for each run.

A model stands for each of a file's models (models.py). Tests of these files that start no server do not run.
"""

from tests.vllm_server_tests.record_of_pooling import POOLING_FILES
from tests.vllm_server_tests.record_of_text import TEXT_FILES
from tests.vllm_server_tests.server_file import ServerFile

FILES: dict[str, ServerFile] = TEXT_FILES | POOLING_FILES
