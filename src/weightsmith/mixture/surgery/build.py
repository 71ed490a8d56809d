"""Plans a recipe that prunes or merges experts from the headers of its model, or reports all problems at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from weightsmith._version import __version__
from weightsmith.checkpoint import Checkpoint, open_checkpoint
from weightsmith.errors import Finding, PlanError, Unsupported, WeightsmithError
from weightsmith.formats.carried import left_out_findings
from weightsmith.formats.hf_folder import natural_key
from weightsmith.mixture.assembly import Assembly
from weightsmith.mixture.packages import missing
from weightsmith.mixture.surgery.counts import groups as router_groups
from weightsmith.mixture.surgery.counts import with_experts
from weightsmith.mixture.surgery.experts import ExpertLayer, Stacked, find_blocks
from weightsmith.mixture.surgery.matching import MatchedPair, matching, read_matched
from weightsmith.mixture.surgery.neurons import neuron_tensors
from weightsmith.mixture.surgery.selection import ExpertGroup, ExpertSelection, Groups
from weightsmith.options import RecipeOptions
from weightsmith.planner.config import output_config
from weightsmith.planner.dtypes import DTypes, kept_specs
from weightsmith.planner.inputs import at, open_models
from weightsmith.planner.loading import question_of
from weightsmith.planner.prepared import Assembled
from weightsmith.plans import CAST, COPY, JOIN, Block, Dropped, Made, Product, Read, Settings, Step
from weightsmith.recipe import Surgery
from weightsmith.structure import analyse
from weightsmith.tensors import DType, TensorSpec

_PRUNED = Made(
    "prune_experts",
    f"Mixture of experts, pruned with weightsmith {__version__}.",
    "The remaining experts are unchanged. The model was not trained after pruning.",
)
_MERGED = Made(
    "merge_experts",
    f"Mixture of experts, some of which were averaged with weightsmith {__version__}.",
    "The model was not trained after merging.",
)


def assemble_surgery(
    recipe: Surgery,
    options: RecipeOptions,
    problems: Sequence[WeightsmithError] = (),
    *,
    folder: Path = Path(),
) -> Assembled:
    """The draft of a parsed recipe.

    problems  found while parsing it
    folder    base for a relative path of the saliency file

    Raises PlanError with all problems. No tensor data is read.
    """
    with ExitStack() as stack:
        asked = options.out_dtype or recipe.dtype
        checkpoint, found = _open(recipe, asked, options.quantize, stack)
        if checkpoint is None:
            raise PlanError([*problems, *found])
        specs = dict(checkpoint.specs)
        blocks, found = find_blocks(specs.values(), str(recipe.model))
        if found:
            raise PlanError([*problems, *(at(problem, recipe.model.where) for problem in found)])
        selection = ExpertSelection(recipe, blocks, folder)
        surgeon = _Surgeon(recipe, checkpoint, blocks, selection, asked)
        config = surgeon.config()
        if problems or selection.problems or surgeon.problems:
            raise PlanError([*problems, *selection.problems, *surgeon.problems])
        made = surgeon.assemble(config, options.shard_bytes)
        # What the tensors of a quantised model are is up to its own loader.
        if options.check_loading and checkpoint.quantised is None:
            where, shape = recipe.model.where, made.structure
            made.loading = question_of(made.draft, checkpoint.config, specs.values(), shape, checkpoint.ref, where=where)
        stack.pop_all()
        return made


def _open(
    recipe: Surgery, asked: DType | None, quantize: str | None, stack: ExitStack
) -> tuple[Checkpoint | None, list[WeightsmithError]]:
    """Open the model. Pruning alone works on quantised experts too: their codes and scales are copied."""
    ref = recipe.model
    if recipe.prune is None or asked is not None or quantize is not None or ref.lora is not None:
        opened, problems = open_models([ref], stack)
        return opened[0], problems
    try:
        checkpoint = open_checkpoint(ref.path, revision=ref.revision or None, raw=True, download=False)
    except WeightsmithError as error:
        return None, [at(error, ref.where)]
    stack.callback(checkpoint.close)
    return checkpoint, []


class _Surgeon:
    def __init__(
        self,
        recipe: Surgery,
        checkpoint: Checkpoint,
        blocks: Sequence[ExpertLayer],
        selection: ExpertSelection,
        asked: DType | None,
    ) -> None:
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.blocks = blocks
        self.selection = selection
        self.asked = asked
        self.problems: list[WeightsmithError] = []
        self.warnings: list[Finding] = [*recipe.findings, *checkpoint.notes]
        self.specs = dict(checkpoint.specs)
        self.dtypes = DTypes(asked, [kept_specs(checkpoint)])
        self.settings: dict[tuple[float, ...], int] = {}
        self.products: list[Product] = []
        merge = recipe.merge.values if recipe.merge is not None else {}
        self.matched: bool = merge.get("match", False)
        self.mean_router = merge.get("router") == "mean"

    def config(self) -> dict[str, Any]:
        """config.json with the new number of experts. Adds problems with the config and with merging."""
        old, new = self.blocks[0].experts, self.selection.experts
        config = self.checkpoint.config
        if config is None:
            fix = "put its config.json next to the weights, and name the folder"
            self.problems.append(Unsupported("there is no config.json", where=str(self.recipe.model), fix=fix))
            return {}
        if self.recipe.merge is not None:
            self._check_merge()
        if not new:
            return {}
        changed, problems = with_experts(config, old, new, self.selection.where)
        self.problems += problems
        self._note_router_groups(router_groups(config, old), old, new)
        return changed

    def _check_merge(self) -> None:
        """Check that experts can be averaged, and matched if requested."""
        block = self.blocks[0]
        tensors = [*(spec for parts in block.own for spec in parts.values()), *(stacked.spec for stacked in block.fused)]
        codes = next((spec for spec in tensors if not spec.dtype.floating), None)
        if codes is not None:
            fix = "use prune_experts, which copies experts, or a checkpoint that is not quantised"
            self.problems.append(Unsupported(f"{codes.dtype} cannot be averaged", where=codes.name, fix=fix))
        if block.scaled:
            what = "each expert has its own output factor, which a merged expert would need multiplied into its weights"
            self.problems.append(Unsupported(what, where=block.scaled, fix="use prune_experts"))
        if self.matched:
            section = self.selection.section
            packages = missing(("scipy",), "matched experts", "moe", "or write match: false, which does not require it")
            self.problems += [at(problem, section.at("match")) for problem in packages]
            try:
                neuron_tensors(block, 0, self.checkpoint.config or {})
            except WeightsmithError as error:
                self.problems.append(at(error, section.at("match")))

    def _note_router_groups(self, n: int, old: int, new: int) -> None:
        """Warn if experts change groups and the router first chooses among groups."""
        if n == 1 or new % n or old % n:
            return
        for layer, groups in self.selection.groups.items():
            if any(i // (new // n) != group.experts[0] // (old // n) for i, group in enumerate(groups)):
                what = f"the router of layer {layer} first chooses among {n} groups of experts, and some experts change groups"
                fix = f"keep equally many of every {old // n} experts, in order (see n_group)"
                self.warnings.append(Finding(what, self.selection.where, fix=fix))
                return

    # --- steps -------------------------------------------------------------------------------------------------------

    def assemble(self, config: dict[str, Any], max_shard_bytes: int) -> Assembled:
        steps: list[Step] = []
        moved: set[str] = set()
        for block in self.blocks:
            groups = self.selection.groups[block.layer]
            keep = groups if self.mean_router else tuple(ExpertGroup(group.experts[:1]) for group in groups)
            sources = self._sources(block, groups)
            steps += [step for i, group in enumerate(groups) for step in self._own(block, i, group, sources)]
            steps += [self._stacked(block, stacked, groups, sources) for stacked in block.fused]
            steps += [self._stacked(block, stacked, keep, {}) for stacked in block.router]
            moved |= {spec.name for parts in block.own for spec in parts.values()}
            moved |= {stacked.spec.name for stacked in (*block.fused, *block.router)}
        for name, spec in self.specs.items():
            if name not in moved:
                steps.append(self._step(name, spec.shape, spec, [Read(0, name)]))
        steps.sort(key=lambda step: natural_key(step.out.name))
        return self._assembled(steps, config, max_shard_bytes)

    def _sources(self, block: ExpertLayer, groups: Groups) -> dict[tuple[int, str], Read]:
        """Reads that replace the model's tensors for experts with matched neurons, by expert and key."""
        found: dict[tuple[int, str], Read] = {}
        config, pairs = self.checkpoint.config or {}, []
        for group in groups if self.matched else ():
            first = neuron_tensors(block, group.experts[0], config)
            for e in group.experts[1:]:
                pair = MatchedPair(f"{block.prefix}experts.{e}", first, neuron_tensors(block, e, config))
                pairs.append(pair)
                found |= {(e, key): read_matched(pair.owner, tensor) for key, tensor in pair.other.items()}
        if pairs:
            self.products.append(matching(block.layer, pairs, self.checkpoint.ref))
        return found

    def _own(self, block: ExpertLayer, new: int, group: ExpertGroup, sources: Mapping[tuple[int, str], Read]) -> list[Step]:
        """The tensors of new expert `new`, if experts have separate tensors."""
        steps = []
        for part, spec in block.own[group.experts[0]].items() if block.own else ():
            inputs = [sources.get((e, part)) or Read(0, block.name(e, part)) for e in group.experts]
            steps.append(self._step(block.name(new, part), spec.shape, spec, inputs, group.shares))
        return steps

    def _stacked(self, block: ExpertLayer, stacked: Stacked, groups: Groups, sources: Mapping[tuple[int, str], Read]) -> Step:
        """A tensor of all experts. Adjacent experts that stay adjacent are copied as one piece."""
        spec, run = stacked.spec, stacked.run(block.experts)
        dtype = self._dtype(spec)
        pieces: list[Step] = []
        for first, group, n in _runs(groups):
            inputs = [
                sources.get((e, spec.name)) or Read(0, spec.name, Block(e * run, 1, n * run, n * run)) for e in group.experts
            ]
            pieces.append(self._step(f"{spec.name}[{first}]", stacked.shape(n), spec, inputs, group.shares, dtype))
        out = TensorSpec(spec.name, dtype, stacked.shape(len(groups)))
        return Step(out, JOIN, (), pieces=tuple(pieces))

    def _step(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: TensorSpec,
        inputs: Sequence[Read],
        shares: tuple[float, ...] = (),
        dtype: DType | None = None,
    ) -> Step:
        """A copy of one input, or the mean of several. stored: the inputs' spec in the model."""
        out = TensorSpec(name, dtype or self._dtype(stored), shape)
        if len(inputs) == 1:
            return Step(out, COPY if out.dtype is stored.dtype else CAST, tuple(inputs))
        return Step(out, "linear", tuple(inputs), settings=self.settings.setdefault(shares, len(self.settings) + 1))

    def _dtype(self, spec: TensorSpec) -> DType:
        return self.dtypes.of([Read(0, spec.name)]) if spec.dtype.floating else spec.dtype

    # --- the rest of the plan ----------------------------------------------------------------------------------------

    def _assembled(self, steps: list[Step], config: dict[str, Any], max_shard_bytes: int) -> Assembled:
        assembly = Assembly(_PRUNED if self.recipe.prune is not None else _MERGED)
        draft, checkpoint = assembly.draft, self.checkpoint
        assembly.add(checkpoint)
        structure = analyse(self.specs.values(), checkpoint.config)
        if checkpoint.quantised is None:
            written = [step.out for step in steps]
            config, _ = output_config(config, structure, {}, written, stored=self.specs, asked=self.asked, untie=False)
        draft.steps, draft.config, draft.products = steps, config, self.products
        draft.settings += [
            Settings({"normalize": True}, tuple({"weight": share} for share in shares)) for shares in self.settings
        ]
        draft.dropped = list(self._dropped(steps))
        draft.carried = [file for file in checkpoint.files if file != "config.json"]
        draft.max_shard_bytes, draft.recipe = max_shard_bytes, self.recipe.text
        draft.warnings = [*self.warnings, *self.dtypes.findings(), *left_out_findings(checkpoint.left_out, checkpoint.ref)]
        named = [self.selection.saliency_path] if self.selection.saliency_path is not None else []
        return Assembled(draft, assembly.inputs, structure, named=named)

    def _dropped(self, steps: Sequence[Step]) -> tuple[Dropped, ...]:
        """Tensors of removed experts."""
        used = {read.tensor for step in steps for read in step.reads}
        return tuple(Dropped(0, name, "its expert is removed") for name in self.specs if name not in used)


def _runs(groups: Groups) -> list[tuple[int, ExpertGroup, int]]:
    """New number, group and run length: adjacent experts in groups of one that stay adjacent form one run."""
    found: list[tuple[int, ExpertGroup, int]] = []
    for new, group in enumerate(groups):
        if found and len(group.experts) == 1:
            first, before, n = found[-1]
            if len(before.experts) == 1 and before.experts[0] + n == group.experts[0]:
                found[-1] = first, before, n + 1
                continue
        found.append((new, group, 1))
    return found
