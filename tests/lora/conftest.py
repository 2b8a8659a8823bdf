from __future__ import annotations

from tests.helpers.fixtures import tiny, tiny_folder, two_threads  # noqa: F401
