"""vLLM's way to start the server: `python -m hetero_llm.entrypoints.openai.api_server --model M`,
which is `hetero-llm serve`."""

import sys

from hetero_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
