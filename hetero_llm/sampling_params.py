"""vLLM's path of the parameters of requests."""

from hetero_llm.core.sampling_params import BeamSearchParams as BeamSearchParams
from hetero_llm.core.sampling_params import RequestOutputKind as RequestOutputKind
from hetero_llm.core.sampling_params import SamplingParams as SamplingParams
from hetero_llm.core.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
from hetero_llm.core.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
