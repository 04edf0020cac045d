"""Workers of other engines (vLLM, vllm-ascend) behind the interface of an instance: over HTTP instead of gRPC.

connection.py describes a worker and opens a session; session.py runs its prompts, prefill_legs.py those whose tokens
another worker generates; request_body.py writes the bodies, answers.py reads the answers; load.py reads /metrics.
"""
