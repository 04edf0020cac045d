"""`python -m pdserve.endpoints.openai.run_batch -i IN -o OUT --model M`."""
