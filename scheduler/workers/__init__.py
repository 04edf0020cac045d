"""Workers of other engines (vLLM, vllm-ascend) behind the interface of an instance: HTTP in place of a session.

connection.py describes a worker and opens a session; session.py runs its prompts; request_body.py writes the bodies,
answers.py reads them; load.py reads /metrics.
"""
