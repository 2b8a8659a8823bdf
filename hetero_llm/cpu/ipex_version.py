"""Which IPEX is installed and whether it fits torch. The standard library alone, so that
`hetero-llm doctor` can ask on a broken installation."""

from __future__ import annotations

import importlib.metadata

PACKAGE = "intel-extension-for-pytorch"
MODULE = "intel_extension_for_pytorch"
INSTALL = f"pip install torch==2.8.0 transformers==4.51.3 {PACKAGE}==2.8.0"
"""The last release; for an environment of its own."""


def installed_version() -> str | None:
    """Of the package; None if there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def mismatch(version: str, torch_version: str) -> str | None:
    """What is wrong with this pair of versions; None if nothing is.

    IPEX x.y is compiled for torch x.y and cannot be loaded with another.
    """
    wanted, found = (".".join(text.split(".")[:2]) for text in (version, torch_version))
    if wanted == found:
        return None
    return f"{PACKAGE} {version} needs torch {wanted}, and {torch_version} is installed"
