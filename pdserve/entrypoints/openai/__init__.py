"""`python -m pdserve.entrypoints.openai.api_server --model M`, and `...run_batch`."""
