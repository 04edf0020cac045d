"""The commands on batches that the guides print, as printed but for the name of the program.

SITE stands for where the guides' example files and buckets are, MODULE for `python -m` and the name of the package.
"""

LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
NOUS_31 = "NousResearch/Meta-Llama-3.1-8B-Instruct"

OPENAI_MODULE = r"""python -m pdserve.entrypoints.openai.run_batch \
    -i offline_inference/openai_batch/openai_example_batch.jsonl \
    -o results.jsonl \
    --model meta-llama/Meta-Llama-3-8B-Instruct
"""
OPENAI_COMMAND = r"""pdserve run-batch \
    -i offline_inference/openai_batch/openai_example_batch.jsonl \
    -o results.jsonl \
    --model meta-llama/Meta-Llama-3-8B-Instruct
"""
OPENAI_REMOTE = r"""pdserve run-batch \
    -i SITE/vllm-project/vllm/main/examples/offline_inference/openai_batch/openai_example_batch.jsonl \
    -o results.jsonl \
    --model meta-llama/Meta-Llama-3-8B-Instruct
"""
OPENAI_PRESIGNED = r"""python -m pdserve.entrypoints.openai.run_batch \
    -i "SITE/MY_BUCKET/MY_INPUT_FILE.jsonl?AWSAccessKeyId=ABCDEFGHIJKLMNOPQRST&Signature=abcdefghijklmnopqrstuvwxyz12345&Expires=EXPIRES" \
    -o "SITE/MY_BUCKET/MY_OUTPUT_FILE.jsonl?AWSAccessKeyId=ABCDEFGHIJKLMNOPQRST&Signature=abcdefghijklmnopqrstuvwxyz12345&Expires=EXPIRES" \
    --model --model meta-llama/Meta-Llama-3-8B-Instruct
"""  # noqa: E501 - as printed
BATCHED_MODULE = (
    "python -m pdserve.endpoints.openai.run_batch -i batched_example.jsonl -o results.jsonl "
    "--model NousResearch/Meta-Llama-3.1-8B-Instruct"
)
BATCHED_REMOTE = (
    "python -m pdserve.endpoints.openai.run_batch "
    "-i SITE/PygmalionAI/aphrodite-engine/rc_054/examples/openai_api/batched_example.jsonl -o results.jsonl "
    "--model NousResearch/Meta-Llama-3.1-8B-Instruct"
)
EMBEDDINGS = """\
{"custom_id": "request-1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "intfloat/e5-mistral-7b-instruct", "input": "You are a helpful assistant."}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/embeddings", "body": {"model": "intfloat/e5-mistral-7b-instruct", "input": "You are an unhelpful assistant."}}
"""  # noqa: E501 - as printed
SCORES = """\
{"custom_id": "request-1", "method": "POST", "url": "/v1/score", "body": {"model": "BAAI/bge-reranker-v2-m3", "text_1": "What is the capital of France?", "text_2": ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/score", "body": {"model": "BAAI/bge-reranker-v2-m3", "text_1": "What is the capital of France?", "text_2": ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]}}
"""  # noqa: E501 - as printed
