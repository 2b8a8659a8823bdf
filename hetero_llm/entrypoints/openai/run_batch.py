"""vLLM's way to answer a file: `python -m hetero_llm.entrypoints.openai.run_batch -i A -o B`, which
is `hetero-llm run-batch`."""

import sys

from hetero_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["run-batch", *sys.argv[1:]]))
