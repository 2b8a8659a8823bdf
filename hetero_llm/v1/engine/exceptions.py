"""vLLM's path of `EngineDeadError`."""

from hetero_llm.core.errors import EngineDeadError as EngineDeadError
