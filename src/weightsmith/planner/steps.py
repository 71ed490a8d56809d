"""The Plan: every output tensor, its op, inputs and parameters. Pure data, printable, with a JSON round trip.

A plan is made from a recipe and the headers of the inputs alone (`weightsmith.planner.build`). The engine runs it; the store
knows from it where every byte goes before the first is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from typing import Any

from weightsmith.errors import Finding
from weightsmith.jobs.job import Value
from weightsmith.jobs.operations import JOIN, OPERATIONS
from weightsmith.store.layout import Layout, make_layout
from weightsmith.tensors import DTYPES, TensorSpec

MOE = "moe"
"""`Plan.method` of a mixture of experts."""

PRUNED = "prune_experts"
"""`Plan.method` of a mixture of experts that loses some."""

MERGED_EXPERTS = "merge_experts"
"""`Plan.method` of a mixture of experts of which some become one."""

COMPUTED = "(computed)"
"""`ModelInput.ref` of tensors that no checkpoint has."""


@dataclass(frozen=True, slots=True)
class Window:
    """A block of a tensor's elements: `rows` runs of `cols` elements, the first at `offset`, `stride` from one to the next."""

    offset: int
    rows: int
    cols: int
    stride: int

    @property
    def whole_rows(self) -> bool:
        """The block is one run of elements."""
        return self.cols == self.stride or self.rows == 1

    def flat(self, index: int) -> int:
        """The tensor's flat index of the block's element `index`.

        >>> Window(offset=5, rows=3, cols=2, stride=10).flat(3)
        16
        """
        row, col = divmod(index, self.cols)
        return self.offset + row * self.stride + col


@dataclass(frozen=True, slots=True)
class Source:
    """One input of a step: tensor `tensor` of `plan.models[model]`, or a window of it (an expert, half of a fused matrix)."""

    model: int
    tensor: str
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved parameters, shared by all the steps that have the same ones.

    shared   the parameters of the output tensor
    models   for each input of the step, in order, its own parameters ({} for a base that takes none)
    """

    shared: Mapping[str, Value | None]
    models: tuple[Mapping[str, Value | None], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """How one output tensor is made.

    out       name, dtype and shape as written
    op        `copy` (bytes as they are), `cast` (copy with another dtype), another of `jobs.operations`, the name of a merge
              method, or `join`: the pieces one after another
    inputs    in the recipe's order; with a base, the base first
    base      True when inputs[0] is the base of the merge
    settings  index into `plan.settings`
    pieces    of a `join`: steps that each make a run of the tensor's elements, as if it were a tensor of its own
    """

    out: TensorSpec
    op: str
    inputs: tuple[Source, ...]
    base: bool = False
    settings: int = 0
    pieces: tuple[Step, ...] = ()

    @property
    def leaves(self) -> tuple[Step, ...]:
        """The steps that do the work: the pieces, else the step itself."""
        return self.pieces or (self,)

    @property
    def merges(self) -> bool:
        """A merge method makes the tensor; of a `join`, ask its leaves."""
        return self.op != JOIN and self.op not in OPERATIONS

    @property
    def made_by(self) -> str:
        """The op of the leaves where all have the same, else `join`."""
        ops = {leaf.op for leaf in self.leaves}
        return ops.pop() if len(ops) == 1 else self.op

    def to_json(self) -> dict[str, Any]:
        """The step as JSON values."""
        data: dict[str, Any] = {
            "name": self.out.name,
            "dtype": self.out.dtype.name,
            "shape": list(self.out.shape),
            "op": self.op,
            "inputs": [[i.model, i.tensor, *(astuple(i.window) if i.window else ())] for i in self.inputs],
            "base": self.base,
            "settings": self.settings,
        }
        return data | ({"pieces": [p.to_json() for p in self.pieces]} if self.pieces else {})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Step:
        """A step from what `to_json` gave."""
        return cls(
            out=TensorSpec(data["name"], DTYPES[data["dtype"]], tuple(data["shape"])),
            op=data["op"],
            inputs=tuple(Source(m, t, Window(*w) if w else None) for m, t, *w in data["inputs"]),
            base=data["base"],
            settings=data["settings"],
            pieces=tuple(cls.from_json(p) for p in data.get("pieces", ())),
        )


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input checkpoint: how the user named it, and what it was when planned.

    ref          as written in the recipe (`org/name@revision`, `./folder`)
    revision     commit of a hub model, "" otherwise
    header_hash  of all safetensors headers and file sizes: another checkpoint has another hash
    """

    ref: str
    revision: str
    header_hash: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """An input tensor that is not in the output, and why."""

    model: int
    tensor: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything that will happen, before anything does.

    method           the recipe's merge method, for the card
    models           inputs, in the recipe's order (base first when there is one)
    steps            output tensors in model order
    settings         the tables `Step.settings` points into
    dropped          every input tensor that is not used, with its reason
    config           the new config.json, or None when the donor has none
    donor            index of the model that gives config, tokenizer and all other files
    carried          names of the donor's files copied as they are
    max_shard_bytes  upper bound of a weight file
    seed             of the random masks
    warnings         what the user should know
    recipe           the recipe's text, byte for byte
    """

    method: str
    models: tuple[ModelInput, ...]
    steps: tuple[Step, ...]
    settings: tuple[Settings, ...]
    dropped: tuple[Dropped, ...] = ()
    config: dict[str, Any] | None = None
    donor: int = 0
    carried: tuple[str, ...] = ()
    max_shard_bytes: int = 5_000_000_000
    seed: int = 0
    warnings: tuple[Finding, ...] = field(default=())
    recipe: str = ""

    @cached_property
    def layout(self) -> Layout:
        """Where every output byte goes."""
        return make_layout([s.out for s in self.steps], self.max_shard_bytes)

    @cached_property
    def widest(self) -> int:
        """Inputs of the step that has most."""
        return max((len(leaf.inputs) for step in self.steps for leaf in step.leaves), default=1)

    @cached_property
    def hash(self) -> str:
        """Identity of the plan: equal hashes mean equal output bytes (sha256, hex)."""
        data = self.to_json()
        data.pop("warnings")
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        # Without what is computed from the rest: the layout is large, and holds a view that cannot be pickled.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `Plan.from_json` is its inverse."""
        return {
            "method": self.method,
            "models": [{"ref": m.ref, "revision": m.revision, "header_hash": m.header_hash} for m in self.models],
            "settings": [{"shared": dict(s.shared), "models": [dict(m) for m in s.models]} for s in self.settings],
            "steps": [s.to_json() for s in self.steps],
            "dropped": [{"model": d.model, "tensor": d.tensor, "reason": d.reason} for d in self.dropped],
            "config": self.config,
            "donor": self.donor,
            "carried": list(self.carried),
            "max_shard_bytes": self.max_shard_bytes,
            "seed": self.seed,
            "warnings": [{"what": w.what, "where": w.where, "details": list(w.details), "fix": w.fix} for w in self.warnings],
            "recipe": self.recipe,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """A plan from what `to_json` gave."""
        return cls(
            method=data["method"],
            models=tuple(ModelInput(**m) for m in data["models"]),
            settings=tuple(Settings(s["shared"], tuple(s["models"])) for s in data["settings"]),
            steps=tuple(Step.from_json(s) for s in data["steps"]),
            dropped=tuple(Dropped(**d) for d in data["dropped"]),
            config=data["config"],
            donor=data["donor"],
            carried=tuple(data["carried"]),
            max_shard_bytes=data["max_shard_bytes"],
            seed=data["seed"],
            warnings=tuple(Finding(w["what"], w["where"], tuple(w["details"]), w["fix"]) for w in data["warnings"]),
            recipe=data["recipe"],
        )
