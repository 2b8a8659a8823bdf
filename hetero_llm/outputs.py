"""vLLM's path of the outputs of requests."""

from hetero_llm.core.outputs import CompletionOutput as CompletionOutput
from hetero_llm.core.outputs import RequestMetrics as RequestMetrics
from hetero_llm.core.outputs import RequestOutput as RequestOutput
from hetero_llm.core.pooling_outputs import ClassificationOutput as ClassificationOutput
from hetero_llm.core.pooling_outputs import (
    ClassificationRequestOutput as ClassificationRequestOutput,
)
from hetero_llm.core.pooling_outputs import EmbeddingOutput as EmbeddingOutput
from hetero_llm.core.pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from hetero_llm.core.pooling_outputs import PoolingOutput as PoolingOutput
from hetero_llm.core.pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
from hetero_llm.core.pooling_outputs import ScoringOutput as ScoringOutput
from hetero_llm.core.pooling_outputs import ScoringRequestOutput as ScoringRequestOutput
