"""Builds the CPU library before its first use: `python -m hetero_llm.cpu.build`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import native


def main(arguments: list[str] | None = None) -> int:
    """Builds the library and prints its path and the instruction set it will use.

    Returns:
        The exit code: 1 if there is no compiler, if it fails or if the library cannot be loaded.
    """
    parser = argparse.ArgumentParser(prog="python -m hetero_llm.cpu.build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="build even if the cache has it")
    parser.add_argument(
        "--sanitize", action="store_true", help="also one with AddressSanitizer and UBSan"
    )
    options = parser.parse_args(arguments)
    try:
        print(f"library: {native.build(force=options.force)}")
        print(f"instruction set: {native.ISA_NAMES[native.isa_level(native.open_library())]}")
        if options.sanitize:
            path = native.build(sanitize=True, force=options.force)
            print(f"with sanitizers: {path}")
    except (OSError, RuntimeError, ConfigError, subprocess.SubprocessError) as error:
        print(f"the CPU library cannot be built: {native.reason(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
