"""vLLM's older path of `Logprob` and `RequestMetrics`."""

from hetero_llm.core.outputs import Logprob as Logprob
from hetero_llm.core.outputs import RequestMetrics as RequestMetrics
