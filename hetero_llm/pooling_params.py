"""vLLM's path of `PoolingParams`."""

from hetero_llm.core.pooling_params import PoolingParams as PoolingParams
