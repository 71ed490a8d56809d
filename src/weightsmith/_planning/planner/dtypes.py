"""The dtype of each output tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from weightsmith._base.errors import Finding
from weightsmith._base.tensors import DType, TensorSpec, promote
from weightsmith._plans import Read


def main_dtype(specs: Iterable[TensorSpec]) -> DType | None:
    """The floating dtype that most bytes have; None when there is none."""
    nbytes: Counter[str] = Counter()  # by name: a DType takes far longer to hash
    specs = list(specs)
    found = {spec.dtype.name: spec.dtype for spec in specs if spec.dtype.floating}
    if len(found) > 1:
        for spec in specs:
            nbytes[spec.dtype.name] += spec.nbytes
    return max(found.values(), key=lambda d: nbytes[d.name]) if found else None


class DTypes:
    """The asked dtype, else the smallest that holds all inputs. Counts the tensors that stay wider than asked.

    asked   of the recipe or the caller; None: none
    models  the tensors of each, in the dtypes that it keeps them in: not those of what an adapter adds to them
    """

    def __init__(self, asked: DType | None, models: Sequence[Mapping[str, TensorSpec]]) -> None:
        self.asked = asked
        self._models = models
        self._main: dict[int, DType | None] = {}
        self._wide: list[str] = []

    def of(self, inputs: Sequence[Read]) -> DType:
        """The dtype of the tensor merged from these."""
        specs = [self._models[i.model][i.tensor] for i in inputs]
        dtype = specs[0].dtype
        for spec in specs:
            if spec.dtype is not dtype:
                dtype = promote(dtype, spec.dtype)
        if self.asked is None or self.asked is dtype:
            return dtype
        # A tensor that is float32 in every model, though a model's other weights are 16-bit, is so on purpose (router
        # biases, state-space decays): a cast to the asked dtype would change how the model routes.
        if dtype.name == "F32" and self.asked.itemsize < 4 and all(s.dtype.name == "F32" for s in specs):
            if any((self._main_of(i.model) or dtype).itemsize < 4 for i in inputs):
                self._wide.append(inputs[0].tensor)
                return dtype
        return self.asked

    def _main_of(self, model: int) -> DType | None:
        if model not in self._main:
            self._main[model] = main_dtype(self._models[model].values())
        return self._main[model]

    def findings(self) -> list[Finding]:
        """What the user should know."""
        n = len(self._wide)
        if not n:
            return []
        kept = "1 tensor stays" if n == 1 else f"{n:,} tensors stay"
        return [Finding(f"{kept} F32 and not {self.asked}: the models store them so among 16-bit weights", self._wide[0])]
