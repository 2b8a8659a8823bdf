"""vLLM's path of the outputs of `LLM.beam_search`."""

from hetero_llm.core.outputs import BeamSearchOutput as BeamSearchOutput
from hetero_llm.core.outputs import BeamSearchSequence as BeamSearchSequence
