"""Embeddings and positions of the rows that belong to prompts with images."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hetero_llm.core.images import PromptImages
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.models.image_tokens import mrope_table
from hetero_llm.models.multimodal import ImageCausalLM, StepImages


@dataclass(slots=True)
class _Slot:
    """A sequence with images.

    Attributes:
        encoded: By the image's number, [count, hidden], from the first of its rows to the last.
        table, shift: See `mrope_table`; None with plain positions.
    """

    images: PromptImages
    encoded: dict[int, torch.Tensor] = field(default_factory=dict)
    table: np.ndarray | None = None
    shift: int = 0


class SlotImages:
    """The images of all slots. An image is encoded when the first row of its tokens comes, and its
    embeddings stay on the device until the last one has: rows found in the prefix cache need none,
    and after a preemption it is encoded again. So no more embeddings are held than prompts in
    work have image tokens."""

    def __init__(self, model: ImageCausalLM, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._slots: dict[int, _Slot] = {}

    def admit(self, state: AdmittedSequence) -> None:
        """A sequence, with or without images, enters its slot."""
        self._slots.pop(state.request_slot, None)
        if state.images is None:
            return
        slot = self._slots[state.request_slot] = _Slot(state.images)
        if self._model.config.mrope:
            slot.table, slot.shift = mrope_table(state.num_prompt_tokens, state.images.items)

    def rows(self, step: SchedulerOutput, positions: np.ndarray) -> StepImages | None:
        """What the model needs to know of a step's rows; None if they are all plain text.

        Args:
            positions: [T] int, each row's position in its sequence, draft nodes included.
        """
        rows: list[np.ndarray] = []
        parts: list[torch.Tensor] = []
        table: np.ndarray | None = None
        begin = 0
        for number, start, count in zip(
            step.request_slots.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_scheduled_tokens.tolist(),
            strict=True,
        ):
            slot = self._slots.get(number)
            if slot is not None:
                for first, part in self._parts(slot, start, start + count):
                    rows.append(np.arange(begin + first - start, begin + first - start + len(part)))
                    parts.append(part)
                if slot.table is not None:
                    if table is None:
                        table = np.tile(positions.astype(np.int64), (3, 1))
                    own = slice(begin, begin + count)
                    table[:, own] = _three_positions(slot, positions[own])
            begin += count
        if not parts and table is None:
            return None
        embeddings = None
        if parts:
            embeddings = self._to_device(np.concatenate(rows)), torch.cat(parts)
        return StepImages(embeddings, None if table is None else self._to_device(table))

    def _parts(self, slot: _Slot, start: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """The embeddings of the tokens `start .. end - 1`: index of the first one, [n, hidden]."""
        found = []
        for number, image in enumerate(slot.images.items):
            first, last = max(image.start, start), min(image.end, end)
            if first >= last:
                continue
            encoded = slot.encoded.pop(number, None)
            if encoded is None:
                encoded = self._model.encode(image)
            if last < image.end:
                slot.encoded[number] = encoded
            found.append((first, encoded[first - image.start : last - image.start]))
        return found

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _three_positions(slot: _Slot, positions: np.ndarray) -> np.ndarray:
    """[3, n] of rows at these positions of their sequence."""
    assert slot.table is not None
    length = slot.table.shape[1]
    prompt = slot.table[:, np.minimum(positions, length - 1)]
    return np.where(positions < length, prompt, positions + slot.shift)
