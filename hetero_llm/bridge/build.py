"""Build the compiled libraries of the bridge (rings, KV copier, pool of host memory) ahead of their
first use: `python -m hetero_llm.bridge.build`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from hetero_llm.bridge.ipc import ring_library as rings
from hetero_llm.bridge.kv_offload import copier_library as copier
from hetero_llm.bridge.kv_offload import pinned_pool as pool
from hetero_llm.utils.native_build import build_library, reason

RECIPES = (("rings", rings.recipe), ("KV copier", copier.recipe), ("host pool", pool.recipe))
"""Name and build recipe of each library."""


def main(arguments: list[str] | None = None) -> int:
    """Build the libraries and print their paths. Returns the exit code: 1 if the compiler is
    missing or fails."""
    parser = argparse.ArgumentParser(prog="python -m hetero_llm.bridge.build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="build even if the cache has it")
    parser.add_argument(
        "--sanitize", action="store_true", help="also one with AddressSanitizer and UBSan"
    )
    options = parser.parse_args(arguments)
    for name, recipe in RECIPES:
        try:
            print(f"{name}: {build_library(recipe(), force=options.force)}")
            if options.sanitize:
                path = build_library(recipe(sanitize=True), force=options.force)
                print(f"{name} with sanitizers: {path}")
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"the library of the {name} cannot be built: {reason(error)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
