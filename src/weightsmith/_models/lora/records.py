"""What an adapter is: its tensors, and what each of them is for."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from weightsmith._models.checkpoint import Checkpoint

CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Factors:
    """The update of one module's weight: scaling · B @ A, of an embedding its transpose.

    a, b       names in the adapter's file of A [rank, inputs] and B [outputs, rank]
    embedding  of an embedding: A is [rank, tokens], B [hidden, rank]
    scaling    alpha / rank, or as rsLoRA has it
    magnitude  name of DoRA's norms of the rows [outputs]; "" without DoRA
    """

    a: str
    b: str
    embedding: bool
    scaling: float
    magnitude: str = ""


@dataclass(frozen=True, slots=True)
class Stacked:
    """Factors of all experts of one parameter [experts, rows, cols] (`target_parameters`).

    a, b  names in the adapter's file of A [experts · rank, inputs] and B [outputs, rank · experts]
    """

    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that factors of experts may belong to: its name after the module's, and what the config says of them."""

    name: str
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter's tensors, and what each is for. Made by `open_adapter`.

    checkpoint    of the adapter's weights; its files are the tokenizer's that lie beside them
    updates       module → its factors; modules are named as PEFT names them, without `base_model.model.`
    replacements  tensor of the model → tensor of the file that takes its place (modules_to_save)
    transposed    `fan_in_fan_out`: weights are stored [inputs, outputs], as GPT-2's are
    stacked       module → factors of its parameters: PEFT wraps the module once for each, and the innermost comes first
    parameters    module of `stacked` → the parameters that these may belong to
    weights       those of `updates` that are factors of the parameter `weight` (`target_parameters`), not of the module
    saved         modules that are saved whole, with all inside (`modules_to_save`): other replacements are put in place
    flat          names of modules have `_` for each dot (kohya's files)
    """

    checkpoint: Checkpoint
    updates: Mapping[str, Factors]
    replacements: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    stacked: Mapping[str, tuple[Stacked, ...]] = field(default_factory=dict)
    parameters: Mapping[str, tuple[Parameter, ...]] = field(default_factory=dict)
    weights: Set[str] = frozenset()
    saved: Set[str] = frozenset()
    flat: bool = False
