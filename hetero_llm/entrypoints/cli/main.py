"""vLLM's path of the command line: `python -m hetero_llm.entrypoints.cli.main serve M`."""

import sys

from hetero_llm.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
