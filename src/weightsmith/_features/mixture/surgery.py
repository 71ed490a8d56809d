"""Plans a recipe that prunes or merges experts from the headers of its model, or reports all problems at once."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import LayerError, NotFound, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith._base.files import expand_user, show
from weightsmith._base.installation import absent_packages
from weightsmith._base.strict_json import read_object, texts
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._base.text import some
from weightsmith._features.mixture.experts import (
    ExpertLayer,
    StackedTensor,
    find_blocks,
    matching,
    neuron_tensors,
    read_matched,
)
from weightsmith._files.copied import left_out_findings
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint
from weightsmith._models.structure import analyse
from weightsmith._models.structure.configs import EXPERT_COUNTS, sections, whole_numbers
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.files import output_config
from weightsmith._planning.planner.inputs import at, open_models
from weightsmith._planning.planner.loading import question_of
from weightsmith._planning.planner.prepared import Prepared, model_input
from weightsmith._planning.planner.steps import DTypes
from weightsmith._planning.recipe import Surgery
from weightsmith._plans import JOIN, Block, Dropped, PlanDraft, Provenance, Read, Settings, Step
from weightsmith._version import __version__

_PRUNED = Provenance(
    "prune_experts",
    f"Mixture of experts, pruned with weightsmith {__version__}.",
    "The remaining experts are unchanged. The model was not trained after pruning.",
)
_MERGED = Provenance(
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
) -> Prepared:
    """The draft of a parsed recipe.

    problems  found while parsing it
    folder    base for a relative path of the saliency file

    Raises PlanError with all problems. No tensor data is read.
    """
    with ExitStack() as stack:
        asked = options.out_dtype or recipe.dtype
        checkpoint, model_problems = _open(recipe, asked, options, stack)
        if checkpoint is None:
            raise PlanError([*problems, *model_problems])
        specs = dict(checkpoint.specs)
        blocks, model_problems = find_blocks(specs.values(), str(recipe.model))
        if model_problems:
            raise PlanError([*problems, *(at(problem, recipe.model.where) for problem in model_problems)])
        selection = ExpertSelection(recipe, blocks, folder)
        surgeon = _Surgeon(recipe, checkpoint, selection, asked)
        config = surgeon.config()
        if problems or selection.problems:
            raise PlanError([*problems, *selection.problems])
        assembled = surgeon.assemble(config, options.shard_bytes)
        # What the tensors of a quantised model are is up to its own loader.
        if options.check_loading and checkpoint.quantised is None:
            where, shape = recipe.model.where, assembled.structure
            assembled.loading = question_of(
                assembled.draft, checkpoint.config, specs.values(), shape, checkpoint.ref, where=where
            )
        stack.pop_all()
        return assembled


def _open(
    recipe: Surgery, asked: DType | None, options: RecipeOptions, stack: ExitStack
) -> tuple[Checkpoint | None, list[WeightsmithError]]:
    """Open the model. Pruning alone works on quantised experts too: their codes and scales are copied."""
    ref, plain = recipe.model, options.ignore_quantization_config
    if recipe.prune is None or asked is not None or options.quantize is not None or ref.lora is not None or plain:
        opened, problems = open_models([ref], stack, plain=plain)
        return opened[0], problems
    try:
        checkpoint = open_checkpoint(ref.path, revision=ref.revision or None, raw=True, download=False)
    except WeightsmithError as error:
        return None, [at(error, ref.where)]
    stack.callback(checkpoint.close)
    return checkpoint, []


class _Surgeon:
    def __init__(self, recipe: Surgery, checkpoint: Checkpoint, selection: ExpertSelection, asked: DType | None) -> None:
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.blocks, self.selection, self.problems = selection.blocks, selection, selection.problems
        self.asked = asked
        self.specs = dict(checkpoint.specs)
        self.dtypes = DTypes(asked, [checkpoint.kept_specs])
        self.draft = PlanDraft(
            _PRUNED if recipe.prune is not None else _MERGED,
            models=[model_input(checkpoint)],
            settings=[Settings({}, ({},))],
            warnings=[*recipe.findings, *checkpoint.notes],
        )
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
        tensors = [*(spec for parts in block.separate for spec in parts.values()), *(stacked.spec for stacked in block.fused)]
        codes = next((spec for spec in tensors if not spec.dtype.floating), None)
        if codes is not None:
            fix = "use prune_experts, which copies experts, or a checkpoint that is not quantised"
            self.problems.append(Unsupported(f"{codes.dtype} cannot be averaged", where=codes.name, fix=fix))
        if block.scaled:
            what = "each expert has its own output factor, which a merged expert would need multiplied into its weights"
            self.problems.append(Unsupported(what, where=block.scaled, fix="use prune_experts"))
        if self.matched:
            section = self.selection.section
            packages = absent_packages(
                ("scipy",), "matched experts", "moe", "; or write match: false, which does not require it"
            )
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
                self.draft.warn(what, self.selection.where, fix=fix)
                return

    # --- steps -------------------------------------------------------------------------------------------------------

    def assemble(self, config: dict[str, Any], max_shard_bytes: int) -> Prepared:
        steps: list[Step] = []
        moved: set[str] = set()
        for block in self.blocks:
            groups = self.selection.groups[block.layer]
            keep = groups if self.mean_router else tuple(ExpertGroup(group.experts[:1]) for group in groups)
            sources = self._sources(block, groups)
            steps += [step for i, group in enumerate(groups) for step in self._separate(block, i, group, sources)]
            steps += [self._stacked(block, stacked, groups, sources) for stacked in block.fused]
            steps += [self._stacked(block, stacked, keep, {}) for stacked in block.router]
            moved |= {spec.name for parts in block.separate for spec in parts.values()}
            moved |= {stacked.spec.name for stacked in (*block.fused, *block.router)}
        for name, spec in self.specs.items():
            if name not in moved:
                steps.append(self._step(name, spec.shape, spec, [Read(0, name)]))
        steps.sort(key=lambda step: natural_key(step.out.name))
        draft, checkpoint, structure = self.draft, self.checkpoint, analyse(self.specs.values(), self.checkpoint.config)
        if checkpoint.quantised is None:
            written = [step.out for step in steps]
            config, _ = output_config(config, structure, {}, written, stored=self.specs, asked=self.asked, untie=False)
        used = {read.tensor for step in steps for read in step.reads}
        draft.steps, draft.config = steps, config
        draft.dropped = [Dropped(0, name, "its expert is removed") for name in self.specs if name not in used]
        draft.carried, draft.naming = [file for file in checkpoint.files if file != "config.json"], checkpoint.naming
        draft.max_shard_bytes, draft.recipe = max_shard_bytes, self.recipe.text
        draft.warnings += [*self.dtypes.findings(), *left_out_findings(checkpoint.left_out, checkpoint.ref)]
        named = [self.selection.saliency_path] if self.selection.saliency_path is not None else []
        return Prepared(draft, [checkpoint], structure, named=named)

    def _sources(self, block: ExpertLayer, groups: Groups) -> dict[tuple[int, str], Read]:
        """Reads that replace the model's tensors for experts with matched neurons, by expert and key."""
        reads: dict[tuple[int, str], Read] = {}
        config, pairs = self.checkpoint.config or {}, []
        for group in groups if self.matched else ():
            first = neuron_tensors(block, group.experts[0], config)
            for e in group.experts[1:]:
                owner, other = f"{block.prefix}experts.{e}", neuron_tensors(block, e, config)
                pairs.append((owner, first, other))
                reads |= {(e, key): read_matched(owner, tensor) for key, tensor in other.items()}
        if pairs:
            self.draft.products.append(matching(block.layer, pairs, self.checkpoint.ref))
        return reads

    def _separate(
        self, block: ExpertLayer, new: int, group: ExpertGroup, sources: Mapping[tuple[int, str], Read]
    ) -> list[Step]:
        """The tensors of new expert `new`, if experts have separate tensors."""
        steps = []
        for part, spec in block.separate[group.experts[0]].items() if block.separate else ():
            inputs = [sources.get((e, part)) or Read(0, block.name(e, part)) for e in group.experts]
            steps.append(self._step(block.name(new, part), spec.shape, spec, inputs, group.shares))
        return steps

    def _stacked(
        self, block: ExpertLayer, stacked: StackedTensor, groups: Groups, sources: Mapping[tuple[int, str], Read]
    ) -> Step:
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
            return Step.copy(out, inputs[0], stored.dtype)
        weighted = Settings({"normalize": True}, tuple({"weight": share} for share in shares))
        return Step(out, "linear", tuple(inputs), settings=self.draft.add_settings(weighted))

    def _dtype(self, spec: TensorSpec) -> DType:
        return self.dtypes.of([Read(0, spec.name)]) if spec.dtype.floating else spec.dtype


def _runs(groups: Groups) -> list[tuple[int, ExpertGroup, int]]:
    """New number, group and run length: adjacent experts in groups of one that stay adjacent form one run."""
    runs: list[tuple[int, ExpertGroup, int]] = []
    for new, group in enumerate(groups):
        if runs and len(group.experts) == 1:
            first, before, n = runs[-1]
            if len(before.experts) == 1 and before.experts[0] + n == group.experts[0]:
                runs[-1] = first, before, n + 1
                continue
        runs.append((new, group, 1))
    return runs


# ---- A recipe's choice of experts, as groups for every block. Pruning is a merge with groups of one expert

MAX_SALIENCY_BYTES = 64 << 20  # a million experts' numbers


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The experts averaged into one new expert, and their weights. A single expert is copied."""

    experts: tuple[int, ...]
    shares: tuple[float, ...] = (1.0,)


Groups = tuple[ExpertGroup, ...]


class ExpertSelection:
    """The groups of each block, and all problems.

    folder  base for a relative path of the saliency file
    """

    def __init__(self, recipe: Surgery, blocks: Sequence[ExpertLayer], folder: Path) -> None:
        self.blocks = blocks
        self.folder = folder
        self.problems: list[WeightsmithError] = []
        section = recipe.prune or recipe.merge
        assert section is not None
        self.section = section
        key = "keep" if recipe.prune is not None else "groups"
        self.where = section.at(self._key(key))  # the key that determines how many experts remain
        self.groups: dict[str, Groups] = self._pruned() if recipe.prune is not None else self._merged()
        self._check_counts()

    # --- prune_experts -----------------------------------------------------------------------------------------------

    def _pruned(self) -> dict[str, Groups]:
        values = self.section.values
        if "saliency" not in values and "experts" in values:
            self._problem("'experts' has no effect without 'saliency'", "experts", "Remove it.")
        kept = self._most_salient() if "saliency" in values else self._by_layer("keep")
        for _, experts, where in self._entries(kept, "keep"):
            self._check_numbers(experts, "keep", where, "is listed twice")
        return {layer: tuple(ExpertGroup((e,)) for e in experts) for layer, experts in kept.items()}

    def _most_salient(self) -> dict[str, tuple[int, ...]]:
        n_kept = self.section.values.get("experts")
        n = self.blocks[0].experts
        if n_kept is None:
            what = "'saliency' requires 'experts', the number of experts to keep in each layer"
            self._problem(what, "saliency", "Write experts: 32.")
            return {}
        if n_kept > n:
            self._problem(f"cannot keep {n_kept} experts in each layer: there are {n}", "experts", f"Write at most {n}.")
            return {}
        kept = {}
        for layer, numbers in self._saliency().items():
            ranked = sorted(range(n), key=lambda e: (-numbers[e], e))
            kept[layer] = tuple(sorted(ranked[:n_kept]))
        return kept

    @property
    def saliency_path(self) -> Path | None:
        """The recipe's saliency file, if it names one."""
        name = self.section.values.get("saliency")
        return None if name is None else self.folder / expand_user(name)

    def _saliency(self) -> dict[str, tuple[float, ...]]:
        """Layer → one number per expert, from the file; {} after problems."""
        path = self.saliency_path
        assert path is not None
        where = self.section.at("saliency")
        fix = 'write {"0": [one number for each expert of layer 0], "1": ...}'
        try:
            numbers_of_layer = read_object(path, MAX_SALIENCY_BYTES, "a saliency file", fix)
        except NotFound:
            self.problems.append(NotFound("no such saliency file", where=f"{where}: {path}"))
            return {}
        except WeightsmithError as error:
            self.problems.append(error)
            return {}
        n, before = self.blocks[0].experts, len(self.problems)
        for layer, numbers in numbers_of_layer.items():
            bad = [k for k, x in enumerate(numbers) if not _is_number(x)] if isinstance(numbers, list) else [0]
            if bad or len(numbers) != n:
                shown = f"{len(numbers)} values" if isinstance(numbers, list) else type(numbers).__name__
                if isinstance(numbers, list) and len(numbers) == n:
                    shown = f"{show(numbers[bad[0]])} for expert {bad[0]}"
                what = f"layer {layer} needs one finite number for each of its {n} experts, not {shown}"
                self.problems.append(ParameterError(what, where=str(path), fix=fix))
        known = self._known(numbers_of_layer, "saliency", str(path))
        return {layer: tuple(map(float, numbers)) for layer, numbers in known.items()} if len(self.problems) == before else {}

    # --- merge_experts -----------------------------------------------------------------------------------------------

    def _merged(self) -> dict[str, Groups]:
        groups = self._by_layer("groups")
        weights = self._weights(groups)
        n = self.blocks[0].experts
        for _, listed, where in self._entries(groups, "groups"):
            experts = [e for group in listed for e in group]
            valid = self._check_numbers(experts, "groups", where, "is in two groups, or twice in one")
            if valid and len(experts) < n:
                missing = next(e for e in range(n) if e not in experts)
                fix = f"Write [{missing}] to keep it unchanged; to remove experts, use prune_experts."
                self._problem(f"expert {missing} is in no group{where}", self._key("groups"), fix)
        shares = {layer: tuple((1.0,) * len(group) for group in listed) for layer, listed in groups.items()} | dict(weights)
        return {layer: tuple(map(ExpertGroup, listed, shares[layer])) for layer, listed in groups.items()}

    def _weights(self, groups: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights of each layer that has them, checked against its groups."""
        values = self.section.values
        keys = [key for key in ("weights", "weights_by_layer") if key in values]
        fits = "weights" if "groups" in values else "weights_by_layer"
        if not keys:
            return {}
        if keys != [fits]:
            wrong = next(key for key in keys if key != fits)
            self._problem(f"'{wrong}' cannot be combined with '{self._key('groups')}'", wrong, f"Write {fits}.")
            return {}
        weights = self._by_layer("weights")
        for layer, listed, where in self._entries(weights, "weights"):
            sizes = [len(group) for group in groups.get(layer, ())]
            if [len(weights_of_group) for weights_of_group in listed] != sizes and layer in groups:
                problem = f"groups of {sizes} experts have {[len(weights_of_group) for weights_of_group in listed]} weights"
                self._problem(f"{problem}{where}", fits, "Write one weight for each expert of each group.")
            for weights_of_group in listed:
                if min(weights_of_group) < 0 or sum(weights_of_group) <= 0:
                    what = f"invalid weights {list(weights_of_group)}{where}: they must be non-negative, and not all 0"
                    self._problem(what, fits)
        return weights

    # --- both --------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        """The key that the recipe uses: `keep` or `keep_by_layer`."""
        values = self.section.values
        return next((key for key in (name, f"{name}_by_layer", "saliency") if key in values), name)

    def _by_layer(self, name: str) -> dict[str, Any]:
        """The recipe's value for each layer."""
        values = self.section.values
        if name in values:
            return {block.layer: values[name] for block in self.blocks}
        return self._known(values[f"{name}_by_layer"], f"{name}_by_layer", "")

    def _known(self, entries: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
        """The entries of the layers with experts, in order. Unknown and missing layers are problems."""
        layers = [block.layer for block in self.blocks]
        where = file or self.section.at(key)
        strange = [layer for layer in entries if layer not in layers]
        missing = [layer for layer in layers if layer not in entries]
        if strange:
            what = f"layer {strange[0]} has no experts, or does not exist"
            self.problems.append(LayerError(what, where=where, fix=f"write layers that have experts: {some(layers, 8)}"))
        if missing:
            one = len(missing) == 1
            what = (
                f"layer{'' if one else 's'} {some(missing, 8)} {'has' if one else 'have'} experts and {'is' if one else 'are'}"
            )
            self.problems.append(
                LayerError(f"{what} not in '{key}'", where=where, fix="write an entry for every layer that has experts")
            )
        return {layer: entries[layer] for layer in layers if layer in entries}

    def _entries(self, by_layer: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any, str]]:
        """Layer, value and place, for messages, of the entries to check: a single one if all layers share it."""
        shared = name in self.section.values
        for layer, value in list(by_layer.items())[: 1 if shared else None]:
            yield layer, value, "" if shared else f" in layer {layer}"

    def _check_numbers(self, experts: Sequence[int], name: str, where: str, repeated: str) -> bool:
        """Whether the experts exist, each once. repeated: what an expert that is named twice does"""
        n, key = self.blocks[0].experts, self._key(name)
        if beyond := [e for e in experts if e >= n]:
            there = "there is 1 expert" if n == 1 else f"there are {n} experts, 0 to {n - 1}"
            self._problem(f"there is no expert {beyond[0]}{where}: {there}", key)
        twice = [e for k, e in enumerate(experts) if e in experts[:k]]
        if twice and (not beyond or name == "keep"):
            self._problem(f"expert {twice[0]} {repeated}{where}", key, "Write each expert once.")
        return not beyond and not twice

    def _check_counts(self) -> None:
        """config.json has one number of experts for all layers."""
        counts = {layer: len(groups) for layer, groups in self.groups.items()}
        if len(set(counts.values())) > 1:
            first, n = next(iter(counts.items()))
            other, m = next((layer, k) for layer, k in counts.items() if k != n)
            what = f"layer {first} would have {n} experts, but layer {other} {m}"
            fix = "keep the same number in each layer, because config.json has one for all"
            self.problems.append(LayerError(what, where=self.where, fix=fix))

    @property
    def experts(self) -> int:
        """Experts of each layer in the output; 0 if unknown."""
        return len(next(iter(self.groups.values()), ()))

    def _problem(self, what: str, key: str, fix: str = "") -> None:
        self.problems.append(ParameterError(what, where=self.section.at(key), fix=fix))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---- config.json with a new number of experts.

PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Keys for the number of experts per token, or a list of one for each layer."""

DIVISORS = ("n_group", "ep_size", "moe_ep_size", "expert_parallel_size")
"""Keys whose value must divide the number of experts."""

_EXPERT_NAME = re.compile(r"experts\.\d")


def with_experts(config: Mapping[str, Any], old: int, new: int, where: str) -> tuple[dict[str, Any], list[WeightsmithError]]:
    """The config with `new` experts instead of `old`, and problems. where: position in the recipe.

    >>> with_experts({"num_experts": 8, "num_experts_per_tok": 2, "_name_or_path": "org/old"}, 8, 3, "r.yml:2:1")
    ({'num_experts': 3, 'num_experts_per_tok': 2}, [])
    """
    changed = copy.deepcopy(dict(config))
    changed.pop("_name_or_path", None)
    problems: list[WeightsmithError] = []
    counted = [part for _, part in sections(changed) if any(_is(part.get(key), old) for key in EXPERT_COUNTS)]
    if not counted:
        said = [f"{key}: {part[key]}" for _, part in sections(changed) for key in EXPERT_COUNTS if key in part]
        fix = f"write {old} as one of {', '.join(EXPERT_COUNTS)}"
        what = f"the tensors have {old} experts, but config.json does not say so"
        problems.append(Unsupported(what, where="config.json", details=said, fix=fix))
    for part in counted:
        for key in EXPERT_COUNTS:
            if _is(part.get(key), old):
                part[key] = [new] * len(part[key]) if isinstance(part[key], list) else new
        problems += _checked(part, new, where)
    if any(_EXPERT_NAME.search(text) for text in texts(config.get("quantization_config"))):
        what = "quantization_config names experts by number, and the numbers change"
        problems.append(Unsupported(what, where="config.json", fix="name an unquantised checkpoint of the same model"))
    return changed, problems


def router_groups(config: Mapping[str, Any], experts: int) -> int:
    """The number of groups among which the router chooses; 1 if it has none."""
    counts = [part.get("n_group") for _, part in sections(config) if any(_is(part.get(key), experts) for key in EXPERT_COUNTS)]
    return next((n for n in counts if isinstance(n, int) and n > 1), 1)


def _checked(part: Mapping[str, Any], new: int, where: str) -> list[WeightsmithError]:
    """Problems with `new` experts in one mapping of config.json."""
    problems: list[WeightsmithError] = []
    per_token = 0
    for key in PER_TOKEN:
        needed = max(whole_numbers(part.get(key)), default=0)
        per_token = max(per_token, needed)
        if needed > new:
            remaining = "1 expert is" if new == 1 else f"{new} experts are"
            what = f"each token is routed to {needed} experts ({key} in config.json), but only {remaining} left"
            problems.append(LayerError(what, where=where, fix=f"keep at least {needed} in each layer"))
    for key in DIVISORS:
        for n in whole_numbers(part.get(key)):
            if n > 1 and new % n:
                what = f"{new} experts cannot be divided into {n} equal groups ({key} in config.json)"
                problems.append(LayerError(what, where=where, fix=f"keep a multiple of {n}"))
    groups, top = part.get("n_group"), part.get("topk_group")
    if isinstance(groups, int) and groups > 1 and not problems:
        size = new // groups
        # Routers like DeepSeek-V3's rank groups by the sum of their best two experts.
        if size < 2 or (isinstance(top, int) and top * size < per_token):
            what = f"{groups} groups of {size} are too small: a token is routed to {per_token} experts of {top} groups"
            problems.append(LayerError(what, where=where, fix="keep more experts"))
    return problems


def _is(value: object, count: int) -> bool:
    return count in whole_numbers(value) and set(whole_numbers(value)) == {count}
