"""Configurations of tiny checkpoints: families with layer norms."""

from __future__ import annotations

from typing import Any

# family -> (transformers class prefix, class suffix, variant -> configuration)
FAMILIES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {}
