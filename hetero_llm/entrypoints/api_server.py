"""vLLM's way to start its demonstration server, whose `/generate` `hetero-llm serve` answers, too:
`python -m hetero_llm.entrypoints.api_server --model M`."""

import sys

from hetero_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
