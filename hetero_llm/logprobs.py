"""vLLM's path of `Logprob`."""

from hetero_llm.core.outputs import Logprob as Logprob
