"""vLLM's path of the version."""

from hetero_llm import __version__ as __version__
from hetero_llm import __version_tuple__ as __version_tuple__
