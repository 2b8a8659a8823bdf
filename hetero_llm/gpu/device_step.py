"""The device work of a step, which graphs capture and larger steps issue as it is."""

from __future__ import annotations

import torch

from hetero_llm.gpu.adapters import AdapterUse, GpuAdapters, NoGpuAdapters
from hetero_llm.gpu.hybrid_experts import HybridExperts, NoHybridExperts
from hetero_llm.gpu.kernels.compact_kv import compact_kv
from hetero_llm.gpu.kernels.exchange import apply_step_inputs, fetch_pinned, send_results
from hetero_llm.gpu.kernels.sample import (
    MaskPlaces,
    SampleRows,
    make_sample_workspace,
    sample_tokens,
)
from hetero_llm.gpu.kernels.tree_verify import VerifiedTrees, make_verified_trees, verify_trees
from hetero_llm.gpu.step_buffer import RING, StepBuffer, StepInputs
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM
from hetero_llm.models.mixtral import MixtralBlock
from hetero_llm.runner.kv_cache import PagedKVCache


# large: the tensors between all kernels of a step.
class DeviceStep:
    """Owns the tensors between the kernels of a step, which steps share: they run one at a time.

    Args:
        block_tables: [slots, columns] int32, written by every step.
        ring: of input buffers, see `StepFiller`.
        masks: where the step's token masks are, or will be.
        adapters: of the model's products.
        experts: of the model's mixtures.
        results: [places, >= 2 * max_samples] int64 in page-locked memory, in which captured steps
            leave their results in turn.
        max_graph_tokens: most tokens of a captured step that may have draft trees.
        max_prompt_tokens: the same of one without.
        max_tokens: most tokens of any step.
        max_samples: most sampled tokens of any step.

    Attributes:
        last_tokens: [slots] int64, the token last sampled for each request slot.
        tokens: [max_samples] int64, the sampled tokens of the step.
        hidden: [max_prompt_tokens, hidden] output of a captured step's model.
        verified: results of a step with draft trees.
        stage_input: [max_tokens, hidden] what the stage before has sent for the step; of the first
            stage it has no rows.
        samples: whether it has the last layers: else a step ends with `hidden`.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        cache: PagedKVCache,
        block_tables: torch.Tensor,
        ring: torch.Tensor,
        results: torch.Tensor,
        masks: MaskPlaces,
        adapters: GpuAdapters | NoGpuAdapters,
        experts: HybridExperts | NoHybridExperts,
        *,
        max_graph_tokens: int,
        max_prompt_tokens: int,
        max_tokens: int,
        max_samples: int,
    ) -> None:
        device = cache.data.device
        dtype = next(model.parameters()).dtype
        max_num_seqs = len(block_tables)
        self._model = model
        self._cache = cache
        self._block_tables = block_tables
        self._ring = ring
        self._results = results
        self._masks = masks
        self._adapters = adapters
        self._experts = experts
        self._input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)  # of `ring`, of `results`
        self._workspace = make_sample_workspace(max_samples, config.vocab_size, device)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(max_samples, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(max_prompt_tokens, config.hidden_size, dtype=dtype, device=device)
        rank = model.config.rank
        self.samples, self._embeds = rank.is_last, rank.is_first
        received = 0 if rank.is_first else max_tokens
        self.stage_input = torch.zeros(received, config.hidden_size, dtype=dtype, device=device)
        max_groups = max(max_num_seqs, max_graph_tokens)
        self.verified = make_verified_trees(max_groups, max_samples, device)

    def decode(self, buffer: StepBuffer, attention: Attend, *, adapted: AdapterUse) -> None:
        """Model, head, sampling and results of a step that samples once after every token; of a
        stage before the last one `model`.

        Args:
            adapted: see `run_model`.
        """
        if not self.samples:
            self.model(buffer, attention, adapted=adapted)
            return
        inputs = buffer.inputs
        self.sample_rows(inputs, self.run_model(buffer, attention, adapted=adapted))
        send_results(self.tokens[: buffer.layout.tokens], self._turns[1:], ring=self._results)

    def verify(
        self, buffer: StepBuffer, attention: Attend, *, adapted: AdapterUse, verified: VerifiedTrees
    ) -> None:
        """Model, head, sampling, verification and results of a step with draft trees; of a stage
        before the last one `model`.

        Args:
            adapted: see `run_model`.
            verified: the part of `self.verified` for the buffer's layout.
        """
        if not self.samples:
            self.model(buffer, attention, adapted=adapted)
            return
        hidden = self.run_model(buffer, attention, adapted=adapted)
        self.hidden[: buffer.layout.tokens].copy_(hidden)  # for sampling by depth
        self.verify_trees(buffer.inputs, hidden, verified)
        send_results(verified.packed, self._turns[1:], ring=self._results)

    def model(self, buffer: StepBuffer, attention: Attend, *, adapted: AdapterUse) -> None:
        """The model of any step, into `hidden`; `adapted`: see `run_model`."""
        hidden = self.run_model(buffer, attention, adapted=adapted)
        self.hidden[: buffer.layout.tokens].copy_(hidden)

    def run_model(
        self,
        buffer: StepBuffer,
        attention: Attend,
        *,
        adapted: AdapterUse,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fetches the buffer whose turn it is and runs the model: [T, hidden] after the last norm,
        or what the next stage takes.

        Args:
            buffer: how the host has filled it.
            adapted: what tokens may need of adapters.
            selected: [N] int64 rows that the attention's `select` leaves; None: all.
        """
        inputs = buffer.inputs
        fetch_pinned(self._ring, self._turns[:1], out=buffer.words)
        input_ids = apply_step_inputs(
            inputs.token_ids,
            inputs.token_slots,
            self.last_tokens,
            self._block_tables,
            inputs.writes,
            inputs.write_count,
            turn=self._turns[:1],
            ring_size=RING,
            out=self._input_ids[: buffer.layout.tokens],
        )
        waits = adapted is AdapterUse.LOADING
        token_slots = inputs.token_slots if adapted else None
        self._adapters.begin(token_slots, waits=waits, selected=selected)
        self._experts.begin(inputs.slot_mapping)
        if not self._embeds:  # a copy, which the layers overwrite; rows of padding stay as they are
            input_ids = self.stage_input[: buffer.layout.tokens].clone()
        hidden = self._model(input_ids, inputs.positions, attention)
        self._adapters.end()
        return hidden

    @torch.inference_mode()
    def run_large_mixture(self) -> None:
        """Compiles what a mixture's kernels are for steps larger than captured ones. Their tiles
        grow with the number of rows, by powers of two; the mixtures of a model are alike."""
        blocks = (module for module in self._model.modules() if isinstance(module, MixtralBlock))
        block = next(blocks, None)
        if block is None or block.experts.host_memory is not None:
            return
        router, experts = block.router, block.experts
        if experts.function == experts.plain:
            return
        rows, most = len(self.hidden), len(self._input_ids)
        x = self.hidden.new_zeros(most, self.hidden.shape[1])
        self._adapters.begin(None)
        while rows < most:
            rows = min(2 * rows, most)
            ids, weights = router(x[:rows])
            experts.function(x[:rows], ids, weights, experts.gate_up, experts.down)

    def sample(self, inputs: StepInputs[torch.Tensor], hidden: torch.Tensor, count: int) -> None:
        """Samples the step's first `count` tokens into `tokens` and `last_tokens`.

        Args:
            hidden: [T, hidden] of all tokens of the step.
        """
        self.sample_rows(inputs, hidden.index_select(0, inputs.sample_rows[:count]))

    def sample_rows(self, inputs: StepInputs[torch.Tensor], hidden: torch.Tensor) -> None:
        """As `sample`, with the [count, hidden] of the tokens that are sampled after."""
        count = len(hidden)
        sample_tokens(
            self._model.logits(hidden),
            SampleRows(inputs.sampling[:, :count]),
            self._workspace,
            slots=inputs.sample_slots[:count],
            last_tokens=self.last_tokens,
            masks=self._masks,
            out=self.tokens[:count],
        )

    def sample_processed(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """[R] int64 sampled from logits [R, vocab] that processors have changed; see there what
        masks change of them."""
        return sample_tokens(logits, rows, self._workspace, masks=self._masks)

    def verify_trees(
        self, inputs: StepInputs[torch.Tensor], hidden: torch.Tensor, verified: VerifiedTrees
    ) -> None:
        """Samples after every token of every tree, verifies the trees and closes the gaps in the
        KV.

        Args:
            hidden: [T, hidden] of all tokens of the step.
            verified: the part of `self.verified` for the step's groups and samples; written.
        """
        tree = inputs.tree
        assert tree is not None
        rows = inputs.sample_rows
        sampled = sample_tokens(
            self._model.logits(hidden.index_select(0, rows)),
            SampleRows(inputs.sampling),
            self._workspace,
            masks=self._masks,
            out=self.tokens[: len(rows)],
        )
        verify_trees(
            sampled,
            tree.draft_tokens,
            tree.parents,
            slot_mapping=tree.slot_mapping,
            groups=tree.groups,
            last_tokens=self.last_tokens,
            out=verified,
        )
        compact_kv(self._cache.data, verified.sources, verified.destinations, verified.counts)

    def reset_turns(self) -> None:
        """The next step takes the first input buffer and the first place for results: while graphs
        were captured, steps have run without a filled buffer."""
        self._turns.zero_()
