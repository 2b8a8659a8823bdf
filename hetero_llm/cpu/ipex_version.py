"""Which IPEX is installed and whether it fits torch. Uses the standard library alone, so that
`hetero-llm doctor` works on a broken installation."""

from __future__ import annotations

import importlib.metadata

PACKAGE = "intel-extension-for-pytorch"
MODULE = "intel_extension_for_pytorch"
INSTALL = f"pip install torch==2.8.0 transformers==4.51.3 {PACKAGE}==2.8.0"
"""Installs IPEX's last release; for an environment of its own."""


def installed_version() -> str | None:
    """Version of the installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def mismatch(version: str, torch_version: str) -> str | None:
    """Why IPEX cannot run with this torch, in one line; None if it can.

    IPEX x.y is compiled for torch x.y and cannot be loaded with another.
    """
    wanted, found = (".".join(text.split(".")[:2]) for text in (version, torch_version))
    if wanted == found:
        return None
    return f"{PACKAGE} {version} needs torch {wanted}, and {torch_version} is installed"
