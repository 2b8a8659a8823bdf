"""An adapter in host memory, and how it is read from the files of PEFT.

A module's adapter adds scale * B (A x) to its product. Modules that the model has fused into one
`Linear` keep their own B, for their own rows, while their A lie one below the other: one product
with x serves them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from hetero_llm.core.errors import AdapterError, ModelLoadError
from hetero_llm.core.lora import AdapterRef, LoRARequest
from hetero_llm.lora.files import adapter_folder, open_weights, read_tensors
from hetero_llm.lora.peft_config import PeftConfig, read_peft_config
from hetero_llm.lora.targets import AdapterTargets, Target, of_gates, parameter_names
from hetero_llm.models.weight_files import StoredTensor, WeightFile

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.[^.]+)?\.weight")
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One module's B.

    Attributes:
        first_row: of the `Linear`'s outputs.
        first_rank, rank: which rows of `LinearAdapter.a` it takes.
        b: [rows, rank].
    """

    first_row: int
    first_rank: int
    rank: int
    b: Tensor


@dataclass(frozen=True, slots=True)
class LinearAdapter:
    """What an adapter adds to the product of one `Linear` with x [T, K]: for each part,
    (x a^T * scales)[:, its ranks] b^T, in its rows.

    Attributes:
        a: [R, K], the A of all parts.
        scales: [R] float32.
        parts: by their rows.
    """

    a: Tensor
    scales: Tensor
    parts: tuple[AdapterPart, ...]

    def delta(self, rows: int) -> Tensor:
        """[rows, K] float32: what the adapter adds to the weight of the `Linear`."""
        a = self.a.float() * self.scales[:, None]
        total = torch.zeros(rows, a.shape[1])
        for part in self.parts:
            own = a[part.first_rank : part.first_rank + part.rank]
            total[part.first_row : part.first_row + part.b.shape[0]] = part.b.float() @ own
        return total


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits the model.

    Attributes:
        ref: its name, content hash and rank.
        linears: by the name of the `Linear`.
        experts: by the name of a parameter of `Experts`, then by the expert's number.
    """

    ref: AdapterRef
    linears: Mapping[str, LinearAdapter]
    experts: Mapping[str, Mapping[int, LinearAdapter]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        return sum(
            tensor.nbytes
            for linear in self.all_products()
            for tensor in (linear.a, linear.scales, *(part.b for part in linear.parts))
        )

    def all_products(self) -> Iterator[LinearAdapter]:
        """What it adds to products, experts' included."""
        yield from self.linears.values()
        for experts in self.experts.values():
            yield from experts.values()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A and B of one module, as the file has them."""

    module: str
    target: Target
    rank: int
    scale: float
    a: StoredTensor
    b: StoredTensor


def read_adapter(
    request: LoRARequest,
    targets: AdapterTargets,
    *,
    max_rank: int,
    dtype: torch.dtype,
    download_dir: str | None = None,
) -> Adapter:
    """Reads an adapter. Names and shapes are checked before any tensor is read.

    Args:
        max_rank: largest accepted rank of a module.
        dtype: of A and B.
        download_dir: see `adapter_folder`.

    Raises:
        AdapterError: the folder, an option or a tensor is not what the model needs; names it.
    """
    folder = adapter_folder(request.lora_path, field="lora_path", download_dir=download_dir)
    config = read_peft_config(folder)
    try:
        file = open_weights(folder, field="lora_path")
        stored = _Checks(file, config, targets, max_rank).modules()
        tensors = read_tensors(file, [tensor for one in stored for tensor in (one.a, one.b)])
    except ModelLoadError as error:
        raise AdapterError("lora_path", request.lora_path, str(error)) from error
    content_hash = _hash(stored, tensors)
    for one in stored:
        for tensor in (one.a, one.b):
            if not bool(tensors[tensor.name].to(dtype).isfinite().all()):
                reason = f"holds a number that is not finite as {_name(dtype)} ({file.path})"
                raise AdapterError("tensor", tensor.name, reason)
    products = _by_product(stored, tensors, dtype)
    rank = max(linear.a.shape[0] for linear in products.values())
    ref = AdapterRef(request, content_hash, rank)
    own = targets.linears()  # all stages read all of it, so they agree on what it is
    own_weights = targets.expert_weights()
    experts: dict[str, dict[int, LinearAdapter]] = {}
    for (name, expert), linear in products.items():
        if expert is not None and name in own_weights:
            experts.setdefault(name, {})[expert] = linear
    linears = {name: one for (name, expert), one in products.items() if expert is None}
    return Adapter(ref, {name: one for name, one in linears.items() if name in own}, experts)


class _Checks:
    """Pairs the tensors of a file with the modules of the model."""

    def __init__(
        self, file: WeightFile, config: PeftConfig, targets: AdapterTargets, max_rank: int
    ) -> None:
        self._file = file
        self._config = config
        self._targets = targets
        self._max_rank = max_rank

    def modules(self) -> list[_Stored]:
        """The adapted modules in the order of their names.

        Raises:
            AdapterError: tensors are missing, unknown, or of a wrong shape or type.
        """
        pairs: dict[str, dict[str, StoredTensor]] = {}
        of_banks: dict[str, dict[str, StoredTensor]] = {}  # by the module as the file calls it
        called: dict[str, str] = {}
        for tensor in self._file.tensors:
            found = _KEY.fullmatch(tensor.name)
            if found is None:
                self._refuse(tensor.name, "is no A or B of a linear layer")
                continue
            module, side = found.groups()
            if self._targets.banks_of(module):
                if side in of_banks.setdefault(module, {}):
                    self._refuse(tensor.name, "its module is stored twice")
                of_banks[module][side] = tensor
                continue
            name = self._targets.own_name(module)
            if name is None:
                reason = "the base model has no such module: the adapter is of another base"
                self._refuse(tensor.name, reason)
                continue
            if name in self._targets.refused:
                self._refuse(tensor.name, self._targets.refused[name])
            if side in pairs.setdefault(name, {}):
                self._refuse(tensor.name, "its module is stored twice")
            pairs[name][side] = tensor
            called[name] = module
        if not pairs and not of_banks:
            self._refuse(self._file.path.name, "holds no tensor")
        self._check_complete(pairs, called)
        banks = self._banks(of_banks)
        whole = {one.target.linear for one in banks}
        for name in pairs:
            if self._targets.targets[name].linear in whole:
                reason = f"{called[name]} has an adapter of its own and one for all experts"
                self._refuse(called[name], reason)
        modules = [self._stored(name, called[name], pairs[name]) for name in sorted(pairs)]
        return modules + banks

    def _banks(self, of_banks: Mapping[str, Mapping[str, StoredTensor]]) -> list[_Stored]:
        """Those of parameters with all experts' matrices, in the order of their names. A file does
        not say which of a module's parameters its tensors belong to, but no two of them have
        matrices of one size."""
        config = self._config
        found: dict[str, _Stored] = {}
        for module, sides in of_banks.items():
            self._check_sides(module, sides)
            banks = self._targets.banks_of(module)
            named = {name: bank for name, bank in banks.items() if config.names_parameter(name)}
            if not named:
                raise AdapterError(
                    "target_parameters",
                    config.target_parameters,
                    f"names no parameter of {module}, which {self._file.path} has",
                )
            size = sides["B"].shape[:1] + sides["A"].shape[1:]
            fitting = [name for name, bank in named.items() if bank.stored_size == size]
            name = fitting[0] if fitting else next(iter(named))
            if name in found:
                self._refuse(f"{module}.lora_A.weight", f"is the second one for {name}")
            target = named[name]
            found[name] = self._checked(name, name, target, sides)
        there = {one.target.linear for one in found.values()}
        missing = [
            name
            for name, target in self._targets.banks.items()
            if target.linear not in there
            and any(config.names_parameter(one) for one in parameter_names(name))
        ]
        if missing:
            raise AdapterError(
                "target_parameters",
                config.target_parameters,
                f"names parameters that {self._file.path} lacks: {_some(missing)}",
            )
        return [found[name] for name in sorted(found)]

    def _names(self, module: str) -> bool:
        """Whether the options name a module, perhaps by its weight."""
        return self._config.targets(module) or self._config.names_parameter(f"{module}.weight")

    def _check_complete(self, pairs: Mapping[str, object], called: Mapping[str, str]) -> None:
        config = self._config
        strange = [called[name] for name in pairs if not self._names(called[name])]
        if strange:
            raise AdapterError(
                "target_modules",
                config.target_modules,
                f"does not name these modules of {self._file.path}: {_some(strange)}",
            )
        if config.names_all():
            return  # PEFT's own list depends on the class of the model
        targets = self._targets.targets
        # Experts of transformers from version 5 on are no modules: then the file has none of them.
        experts = any(targets[name].expert is not None for name in pairs)
        missing = [
            name
            for name, target in targets.items()
            if name not in pairs and (experts or target.expert is None) and self._names(name)
        ]
        if missing:
            raise AdapterError(
                "target_modules",
                config.target_modules,
                f"names modules that {self._file.path} lacks: {_some(missing)}",
            )

    def _stored(self, name: str, module: str, sides: Mapping[str, StoredTensor]) -> _Stored:
        """Of a module; `module`: as the file calls it."""
        self._check_sides(module, sides)
        key = module if self._config.targets(module) else f"{module}.weight"
        return self._checked(name, key, self._targets.targets[name], sides)

    def _check_sides(self, module: str, sides: Mapping[str, StoredTensor]) -> None:
        for side in "AB":
            if side not in sides:
                self._refuse(f"{module}.lora_{side}.weight", "is missing")

    def _checked(
        self, name: str, module: str, target: Target, sides: Mapping[str, StoredTensor]
    ) -> _Stored:
        """`name`: of the target; `module`: by which the options have rank and scale."""
        rank = self._config.rank_of(module)
        if rank > self._max_rank:
            reason = f"the rank of {module} exceeds max_lora_rank ({self._max_rank})"
            raise AdapterError("r", rank, f"{reason} ({self._file.path})")
        rows, columns = target.stored_size
        lines = rank * (target.experts or 1)
        wanted = {"A": (lines, columns), "B": (rows, lines)}
        for side, shape in wanted.items():
            tensor = sides[side]
            if not tensor.is_plain:
                self._refuse(tensor.name, f"has type {tensor.type_name}, which is no plain float")
            if tensor.shape != shape:
                reason = f"is {list(tensor.shape)}, the base model and r need {list(shape)}"
                self._refuse(tensor.name, reason)
        scale = self._config.scale_of(module)
        return _Stored(name, target, rank, scale, sides["A"], sides["B"])

    def _refuse(self, name: str, reason: str) -> None:
        raise AdapterError("tensor", name, f"{reason} ({self._file.path})")


def _hash(stored: Iterable[_Stored], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over what determines the adapter's effect, in the order of the modules' names."""
    made = sha256()
    for one in stored:
        for tensor in (one.a, one.b):
            values = tensors[tensor.name]
            about = (one.module, one.scale.hex(), _name(values.dtype), *tensor.shape)
            made.update("\0".join(map(str, about)).encode() + b"\0")
            made.update(values.view(torch.uint8).numpy().data)
    return made.hexdigest()


def _by_product(
    stored: Iterable[_Stored], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[tuple[str, int | None], LinearAdapter]:
    """By the name of the `Linear`, or of the experts' parameter and the number of the expert."""
    grouped: dict[tuple[str, int | None], list[_Stored]] = {}
    products: dict[tuple[str, int | None], LinearAdapter] = {}
    for one in stored:
        if one.target.experts:
            name = one.target.linear
            of_experts = _of_experts(one, tensors[one.a.name], tensors[one.b.name], dtype)
            products.update({(name, number): own for number, own in enumerate(of_experts)})
            continue
        grouped.setdefault((one.target.linear, one.target.expert), []).append(one)
    for key, members in grouped.items():
        members.sort(key=lambda one: one.target.first_row)
        parts, first = [], 0
        for one in members:
            b = one.target.own_b(tensors[one.b.name]).to(dtype).contiguous()
            parts.append(AdapterPart(one.target.first_row, first, one.rank, b))
            first += one.rank
        a = torch.cat([one.target.own_a(tensors[one.a.name]).to(dtype) for one in members])
        scales = [one.scale for one in members for _ in range(one.rank)]
        products[key] = LinearAdapter(a, torch.tensor(scales, dtype=torch.float32), tuple(parts))
    return products


def _of_experts(one: _Stored, a: Tensor, b: Tensor, dtype: torch.dtype) -> Iterator[LinearAdapter]:
    """Each expert's, of tensors for all of them (PEFT's `ParamWrapper`).

    Args:
        a: [experts * rank, columns], an expert's ranks one below the other.
        b: [rows, rank * experts], all experts' columns of a rank side by side. Where the rows are
            those of gate and up, both have the same ranks.
    """
    count = one.target.experts
    scales = torch.full((one.rank,), one.scale, dtype=torch.float32)
    for number in range(count):
        own_a = one.target.own_a(a[number * one.rank : (number + 1) * one.rank])
        own_b = one.target.own_b(b[:, number::count]).to(dtype)
        half = len(own_b) // 2 if of_gates(one.target) else len(own_b)
        parts = tuple(
            AdapterPart(first, 0, one.rank, own_b[first : first + half].contiguous())
            for first in range(0, len(own_b), half)
        )
        yield LinearAdapter(own_a.to(dtype).contiguous(), scales, parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
