"""What a merge method says of itself. The maths is in the method's own file, and `signature.py` makes the record of it.

From these records come the registry, `weightsmith methods`, the docs pages, the JSON schema and the checks at plan time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightsmith._base.errors import nearest
from weightsmith._plans import Parameters, Product, Role, Settings, Step, Value

if TYPE_CHECKING:
    from weightsmith.abc.job import Job, Matrix

ParameterType = Literal["float", "int", "bool", "str"]
Scope = Literal["model", "tensor"]
BaseRole = Literal["required", "optional", "input"]
Family = Literal["average", "sphere", "delta", "sparse", "spectral", "data", "copy"]

FAMILIES: Mapping[Family, str] = {
    "average": "Averages: one point between the models",
    "sphere": "Along the sphere: keeps the length of the weights",
    "delta": "Task vectors: adds what fine-tunes learnt to their base",
    "sparse": "Sparse task vectors: drops or elects changes before adding them",
    "spectral": "Singular vectors: merges directions of whole matrices",
    "data": "With a text: weighs layers by what goes through them",
    "copy": "Copies: layers as they are",
}
"""What the families of methods do, in the order in which they are listed."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a method.

    name     as written in recipes
    kind     `float`, `int`, `bool` or `str`
    doc      one sentence
    scope    `model`: one value for each input; `tensor`: one value for the output tensor
    default  None: the parameter is required
    minimum, maximum   inclusive bounds of numbers
    choices  allowed strings
    optional the parameter may be left out and then has no value (None)
    booleans the values that `false` and `true` mean, for a `str` parameter that was a flag in mergekit
    ignored  why the parameter, accepted because mergekit accepts it, changes nothing
    """

    name: str
    kind: ParameterType
    doc: str
    scope: Scope = "tensor"
    default: Value | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    booleans: tuple[str, str] | tuple[()] = ()
    ignored: str = ""

    @property
    def required(self) -> bool:
        """True when a recipe must give a value."""
        return self.default is None and not self.optional

    def problem(self, value: Value) -> str:
        """Why a value of the right kind is not allowed, or ""."""
        if isinstance(value, str):
            wrong = bool(self.choices) and value not in self.choices
            return f"must be one of {', '.join(self.choices)}{nearest(value, self.choices)}" if wrong else ""
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum:g}"
        if self.maximum is not None and value > self.maximum:
            return f"must be at most {self.maximum:g}"
        return ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A statistic that a method looks at, for the weight of each linear layer.

    kind  a name of `weightsmith._activations.statistics.STATISTICS`
    of    `models`: of each model besides the base, on that model's text; `base`: of the base
    merged  what enters a layer comes out of the merged layers below, and not out of the model's own
    """

    kind: str
    of: Literal["models", "base"] = "models"
    merged: bool = False

    def inputs(self, count: int, *, base: bool) -> range:
        """The places of the inputs that it is of, of so many. base: the first is the base."""
        return range(int(base)) if self.of == "base" else range(int(base), count)


@dataclass(frozen=True, slots=True)
class Method:
    """One merge method.

    name        as written in `merge_method:`
    title       a few words
    family      the kind of method, under which lists show it
    summary     what it does, as text for the docs page
    use         when to use it and when not
    passes      how often it reads its inputs, and what for
    source      paper and section, or the project it comes from
    formula     one line of plain text
    parameters  in the order shown to users
    base        `required`: base_model must be given, the base has no per-model parameters;
                `optional`: used when given; `input`: the base, if listed, is an input like the others
    min_models, max_models   inputs besides the base (with base == "input": all inputs)
    example     a recipe
    job         makes the merge of one logical matrix
    check       checks the resolved parameters (shared, one mapping per input); returns the problem, or ""
    copies      says whether these parameters leave the single input as it is, so that its bytes are copied
    needs       says whether tensors with these parameters wait for the method's product
    product     what must be known of all those tensors before the first is merged, from their steps and settings; or None
    ignored     says whether a model with these parameters of its own is left out of the merge of a tensor: its weight is 0
    keeps_base  says whether tensors of this role stay as the base has them
    elementwise says whether, with these parameters (of the tensor), an element depends on its own position in the inputs and
                perhaps on the whole model, but not on the matrix it is in: fused matrices then need not be taken apart
    on_device   says whether, with these parameters (of the tensor), torch computes linear layers on the device of the run
    otherwise   of a method of linear layers' weights: what is done with all other tensors, `averaged`; "" for other methods
    requires    the statistics that it looks at, with these parameters (of the tensor); the recipe names the text
    """

    name: str
    title: str
    family: Family
    summary: str
    use: str
    passes: str
    source: str
    formula: str
    parameters: tuple[Parameter, ...]
    base: BaseRole
    min_models: int
    max_models: int | None
    example: str
    job: Callable[[Matrix], Job]
    check: Callable[[Parameters, Sequence[Parameters]], str] = lambda shared, models: ""
    copies: Callable[[Sequence[Parameters]], bool] = lambda models: False
    needs: Callable[[Parameters], bool] = lambda shared: False
    product: Callable[[Sequence[tuple[Step, Settings]]], Product | None] = lambda merged: None
    ignored: Callable[[Parameters], bool] = lambda parameters_of_model: False
    keeps_base: Callable[[Parameters, Role], bool] = lambda shared, role: False
    elementwise: Callable[[Parameters], bool] = lambda shared: False
    on_device: Callable[[Parameters], bool] = lambda shared: False
    otherwise: str = ""
    requires: Callable[[Parameters], Sequence[Requirement]] = lambda shared: ()
