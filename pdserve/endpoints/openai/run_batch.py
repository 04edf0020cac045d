"""`python -m pdserve.endpoints.openai.run_batch -i IN -o OUT --model M` is `pdserve run-batch`."""

import sys

from pdserve.entrypoints.openai.run_batch import main

if __name__ == "__main__":
    sys.exit(main("pdserve.endpoints.openai.run_batch"))
