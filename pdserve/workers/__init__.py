"""Start workers of other engines, vLLM and vllm-ascend, with the flags that the ranktables imply."""
