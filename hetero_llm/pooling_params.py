"""vLLM's path of `PoolingParams`, which is not available yet."""

from hetero_llm.core.not_yet import PoolingParams as PoolingParams
