"""vLLM's path of the outputs of requests."""

from hetero_llm.core.outputs import CompletionOutput as CompletionOutput
from hetero_llm.core.outputs import RequestMetrics as RequestMetrics
from hetero_llm.core.outputs import RequestOutput as RequestOutput
