"""The tensors of a candidate, merged into memory: what the decoder reads of a merge that is not written.

They are float32 numbers, rounded as they would be stored. What the last candidate had in common is kept: tensors whose reads
and parameters are the same, and products of the same settings, such as thresholds that weights do not change. If the model does
not fit the budget, only the tensors that were asked for last are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightsmith._base.tensors import TensorSpec
from weightsmith._engine.local import MemoryOutput, run
from weightsmith._engine.memory import JobMemory
from weightsmith._engine.resources import Resources, Workload
from weightsmith._engine.results import Results
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._plans import Plan
from weightsmith._plans.parts import PartHashes
from weightsmith.abc.product import Arrays, Floats, Target, WholeTensor


@dataclass(frozen=True, eq=False)
class Candidate:
    """A merge that is not written.

    tensors  hashes of its tensors, by name: equal ones have equal bytes
    hashes   of all its parts
    """

    plan: Plan
    inputs: Sequence[Checkpoint]
    tensors: Mapping[str, str]
    hashes: PartHashes

    @classmethod
    def of(cls, plan: Plan, inputs: Sequence[Checkpoint]) -> Candidate:
        """From a plan and its open models."""
        hashes = PartHashes(plan)
        return cls(plan, inputs, hashes.tensors(), hashes)


class MergedWeights:
    """The weights of one candidate after another. A `WeightSource`.

    specs        of all tensors, by name
    nbytes       of all tensors in float32
    holds_model  whether all tensors are held at once
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        resources: Resources,
        device: str,
        budget: int,
        *,
        allow_nonfinite: bool,
        memory: JobMemory,
    ) -> None:
        """
        device  that holds the tensors
        budget  bytes that they may take
        memory  of the jobs
        """
        self.specs = specs
        self.nbytes = sum(spec.size for spec in specs.values()) * 4
        self.holds_model = self.nbytes <= budget
        self._resources, self._device, self._allow_nonfinite = resources, device, allow_nonfinite
        self._candidate: Candidate | None = None
        self._tensors = dict[str, Tensor]()
        self._hashes = dict[str, str]()
        self._spare = dict[str, Tensor]()
        self._products = dict[str, Arrays]()
        self._memory = memory

    def use(self, candidate: Candidate) -> None:
        """Take tensors from this candidate from now on. Those that it changes are merged when they are next asked for."""
        self._candidate = candidate
        for name in [name for name, made_from in self._hashes.items() if candidate.tensors[name] != made_from]:
            self._spare[name] = self._tensors.pop(name)  # filled again: freed and new memory would leave gaps between the two
            del self._hashes[name]

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors. Where the model does not fit, all others are dropped."""
        assert self._candidate is not None
        if not self.holds_model:
            for name in [name for name in self._tensors if name not in names]:
                del self._tensors[name], self._hashes[name]
        if missing := [name for name in names if name not in self._tensors]:
            arrays = {name: self._array(name) for name in missing}
            self._merge(self._candidate, arrays, self._products)
            for name, array in arrays.items():
                self._tensors[name] = torch.from_numpy(array).to(self._device)
                self._hashes[name] = self._candidate.tensors[name]
        return {name: self._tensors[name] for name in names}

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        for name, tensor in self.take(list(arrays)).items():
            arrays[name][...] = tensor.cpu().numpy()

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        tensor = self.take([name])[name]
        picked: Floats = tensor[torch.tensor(numbers, device=tensor.device)].cpu().numpy()
        return picked

    def merged(self, candidate: Candidate, names: Sequence[str]) -> dict[str, Floats]:
        """Some tensors of any candidate, with its own dtypes; nothing is kept."""
        arrays = {name: np.empty(self.specs[name].shape, np.float32) for name in names}
        if arrays:
            self._merge(candidate, arrays, {})
        return arrays

    def _array(self, name: str) -> Floats:
        """Memory for a tensor: that of the last candidate's, if the whole model is held."""
        spare = self._spare.pop(name, None)
        if spare is None or not self.holds_model or spare.device.type != "cpu":
            return np.empty(self.specs[name].shape, np.float32)
        array: Floats = spare.numpy()
        return array

    def _merge(self, candidate: Candidate, arrays: Mapping[str, Floats], known: dict[str, Arrays]) -> None:
        """Fill arrays with tensors of a candidate. known: arrays of products by their hash, in; those that were needed, out."""
        plan = candidate.plan
        steps = [step for step in plan.steps if step.out.name in arrays]
        results, products = Results(plan), plan.products_for(steps)
        hashes = {product.name: candidate.hashes.product(product.name) for product in products}
        for product in products:
            if hashes[product.name] in known:
                results.put(product, known[hashes[product.name]])
        targets: dict[str, Target] = {step.out.name: WholeTensor(step.out, arrays[step.out.name]) for step in steps}
        folders = [model.folder for model in candidate.inputs]
        work = Workload(steps, products, None, results, folders, self._allow_nonfinite, memory=self._memory)
        run(plan, candidate.inputs, MemoryOutput(targets), self._resources, work)
        if products:
            finished = [product.name for product in products if results.finished(product.name)]
            known_now = {hashes[name]: results.arrays(name) for name in finished}
            known.clear()
            known.update(known_now)
