"""The output tensors, one step each: which tensors of which models make it, with which parameters and dtype."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weightsmith._base.errors import Finding, LayerError, MismatchError, WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count
from weightsmith._methods.method import Method
from weightsmith._models.structure import vocabulary
from weightsmith._models.structure.projections import fused_parts, role_of
from weightsmith._models.structure.vocabulary import is_other_head, is_task_head
from weightsmith._planning.planner.agreement import Mismatches
from weightsmith._planning.planner.files import NEVER_USED, Counterparts, is_unused
from weightsmith._planning.planner.inputs import at
from weightsmith._planning.planner.match import InputModels, home_module, is_buffer, of_other_senses
from weightsmith._planning.planner.parameters import Resolver
from weightsmith._planning.planner.segments import UNREAD, Account, Placement, Segment, SegmentInput
from weightsmith._planning.planner.steps import DTypes, operation, split_fused
from weightsmith._plans import COPY, Read, Settings, Step

Specs = Mapping[str, TensorSpec]
StepOrigin = tuple[Segment, tuple[str, ...], float]
"""What the parameters of a tensor were looked up with: segment, names in the models (() if all have its own), depth."""
Origins = dict[str, StepOrigin]


AVERAGE = "linear"
"""The method of what only fine-tunes have."""


def takes_head(method: Method, specs: Sequence[Specs], base: int | None) -> bool:
    """Whether models are classifiers and the base, whose differences from them are merged, has not their head."""
    if base is None or method.base == "input":
        return False
    classifies = [any(map(is_task_head, tensors)) for tensors in specs]
    return any(classifies) and not classifies[base]


class StepMaker:
    """Makes the steps, module by module.

    steps    in the order made
    origins  for each merged tensor what its parameters were looked up with: segment, names in the models, depth
    layers   for each of the donor's stacks that changes, the donor's layer behind each output layer
    untie    the output has a head of its own, though the donor ties it to the embedding
    copies   tensors that are left out as copies: the model, the tensor, and the one that is merged in its place
    """

    def __init__(self, models: InputModels, method: Method, resolver: Resolver, account: Account, dtypes: DTypes) -> None:
        self.models = models
        self.method = method
        self.resolver = resolver
        self.account = account
        self.dtypes = dtypes
        self.mismatches = Mismatches(models, method.name)
        self.counterparts = Counterparts(models)
        self.donor = models.names[models.donor].structure
        self.steps: list[Step] = []
        self.origins: Origins = {}
        self.layers: dict[str, list[int]] = {}
        self.untie = False
        self.copies: list[tuple[int, str, str]] = []
        self.warnings: list[Finding] = []
        donor = models.donor
        self._classifies = takes_head(method, [names.specs for names in models.names], models.base)
        self._rows = vocabulary.count_rows(models.names[donor].specs.values(), models.configs[donor])
        self._problems: list[WeightsmithError] = []
        self._whole: dict[int, Segment] = {}
        self._shared: dict[tuple[int, float], StepOrigin] = {}
        self._unused: list[str] = []
        self._always: dict[int, tuple[int, ...]] = {}
        self._rests: dict[int, dict[str, TensorSpec]] = {}
        self._merged: set[int] = set()  # ids of segments whose inputs have been merged somewhere

    @property
    def problems(self) -> list[WeightsmithError]:
        """What is wrong, alike ones counted together."""
        return [*self._problems, *self.mismatches.problems()]

    def make(self, placements: Sequence[Placement]) -> None:
        """The steps of all modules."""
        for placement in placements:
            if placement.segments:
                self._module(placement)
            else:
                for name in self.donor.modules[placement.module]:
                    self._copy(name, self.models.donor, name)
        self._strangers(placements)
        self._note_renamed()
        self._note_unread()
        self._note_unused()

    # ---- modules ---------------------------------------------------------------------------------------------------------

    def _module(self, placement: Placement) -> None:
        for stack in self.donor.stacks_of(placement.module):
            if stack.prefix in placement.sliced or not placement.sliced:
                self._stack(stack.prefix, stack.n_layers, placement.segments)
            else:  # prediction layers next to the sliced stack are copied whole, like the tensors after the layers
                self._stack(stack.prefix, stack.n_layers, (self._whole_of(placement.segments[-1]),))
        for name in self._rest_names(placement):
            segment = placement.segments[0 if vocabulary.comes_first(name) else -1]
            if not segment.broken:
                self._outside(name, segment)
        if placement.sliced:
            self._check_tie(placement)

    def _whole_of(self, segment: Segment) -> Segment:
        """The same inputs with all the layers of a stack."""
        if id(segment) not in self._whole:
            feeds = tuple(replace(feed, first=0, end=None) for feed in segment.feeds)
            self._whole[id(segment)] = replace(segment, feeds=feeds, length=None)
        return self._whole[id(segment)]

    def _stack(self, prefix: str, n_layers: int, segments: Sequence[Segment]) -> None:
        """The layers of one of the donor's stacks, and what they mean for config.json."""
        first, sources = 0, []
        try:
            for segment in segments:
                length = self._length(prefix, segment)
                for i in range(length):
                    if not segment.broken:
                        self._layer(prefix, segment, first + i, i, i / (length - 1) if length > 1 else 1.0)
                        sources.append(self._counterpart(prefix, segment, i))
                first += length
        except LayerError as error:
            self._problems.append(at(error, segment.where))
            return
        if sources != list(range(n_layers)) and not any(s.broken for s in segments):
            self.layers[prefix] = sources

    def _length(self, prefix: str, segment: Segment) -> int:
        if segment.length is not None or segment.broken:
            return segment.length or 0
        counts = {f.model: self.models.names[f.model].depth.get(prefix, 0) for f in self._owners(prefix, segment)}
        present = {m: n for m, n in counts.items() if n}
        labels = self.models.labels
        if not present:
            what = f"none of the models given for module {self.donor.module_of(prefix + 'x')} has layers like {prefix}N"
            fix = f"leave the module out, and it is copied from {labels[self.models.donor]}"
            raise LayerError(what, details=[labels[m] for m in counts], fix=fix)
        if len(set(present.values())) > 1:
            what, details = f"the models have different numbers of layers under {prefix}", present.items()
            lines = [f"{labels[m]}: {n} layers" for m, n in details]
            raise LayerError(what, details=lines, fix="choose layers of each with 'slices'")
        return next(iter(present.values()))

    def _counterpart(self, prefix: str, segment: Segment, i: int) -> int:
        """The donor's layer that config.json takes for layer `i` of the segment."""
        feeds = [f for f in self._owners(prefix, segment) if self.models.names[f.model].depth.get(prefix)]
        feed = next((f for f in feeds if f.model == self.models.donor), feeds[0])
        return self.counterparts.find(prefix, feed.model, feed.first + i)

    def _layer(self, prefix: str, segment: Segment, layer: int, i: int, t: float) -> None:
        """The tensors of one output layer."""
        stacks = [self.models.names[f.model].layers.get(prefix) for f in segment.feeds]
        tables = [layers.get(f.first + i, {}) if layers else {} for f, layers in zip(segment.feeds, stacks, strict=True)]
        places = self._always_listed(segment)
        owners = [k for k in places if stacks[k]]
        if len(owners) == 1 and len(places) > 1 and segment.length is None:
            self._own_layer(f"{prefix}{layer}.", segment.feeds[owners[0]].model, tables[owners[0]])
            return
        donor = next((k for k, f in enumerate(segment.feeds) if f.model == self.models.donor), -1)
        if not owners and donor >= 0:  # its config.json describes the stack
            self._own_layer(f"{prefix}{layer}.", self.models.donor, tables[donor])
            return
        merged = [tables[k] for k in places]
        same = all(table.keys() == merged[0].keys() for table in merged[1:])
        for suffix in merged[0] if same else dict.fromkeys(suffix for table in merged for suffix in table):
            sources = [table.get(suffix) for table in tables]
            if any(sources[k] is None for k in places) and self._without_all(prefix, layer, suffix, segment, i, sources):
                continue
            self._merge(f"{prefix}{layer}.{suffix}", segment, sources, t)

    def _own_layer(self, start: str, model: int, table: Mapping[str, str]) -> None:
        """A layer of a whole stack that one model alone has: a vision tower. start: of its names."""
        for suffix, source in table.items():
            self._own(f"{start}{suffix}", model, source)

    def _without_all(
        self, prefix: str, layer: int, suffix: str, segment: Segment, i: int, sources: Sequence[str | None]
    ) -> bool:
        """Whether a tensor that some models lack is none that a model needs: a buffer, or one that is never used.

        The donor's unused tensors are copied: its other files, and some loaders, count on them.
        """
        stored = {f.model: s for f, s in zip(segment.feeds, sources, strict=True) if s is not None}
        if all(is_buffer(self.models.names[model].specs[source]) for model, source in stored.items()):
            for model, source in stored.items():
                self.account.drop(model, source, "a buffer that the model computes for itself")
            return True
        if not is_unused(self.models, prefix, suffix, [(f.model, f.first + i) for f in segment.feeds]):
            return False
        for model, source in stored.items():
            self.account.drop(model, source, NEVER_USED)
        if self.models.donor in stored:
            self._copy(f"{prefix}{layer}.{suffix}", self.models.donor, stored[self.models.donor])
        self._unused.append(f"{prefix}{layer}.{suffix}")
        return True

    def _always_listed(self, segment: Segment) -> tuple[int, ...]:
        """Places of the inputs of a segment that count for some of its tensors: their weight is not 0 throughout."""
        if id(segment) not in self._always:
            self._always[id(segment)] = places = self.resolver.always_listed(segment)
            self.account.unread |= {f.model for k, f in enumerate(segment.feeds) if k not in places}
        return self._always[id(segment)]

    def _owners(self, prefix: str, segment: Segment) -> list[SegmentInput]:
        """The inputs whose layers a stack of the output has: those that count, else the donor, whose config describes it."""
        feeds = [segment.feeds[k] for k in self._always_listed(segment)]
        if any(self.models.names[f.model].depth.get(prefix) for f in feeds):
            return feeds
        return [*feeds, *(f for f in segment.feeds if f.model == self.models.donor and f not in feeds)]

    # ---- outside the layers ------------------------------------------------------------------------------------------------

    def _rest_names(self, placement: Placement) -> list[str]:
        """Tensors of the module outside its layers, by the donor's names: the donor's first, then the others'."""
        donor, names = self.donor, self.models.names
        listed = dict.fromkeys(n for n in donor.modules[placement.module] if donor.locate(n) is None)
        home = home_module(donor)
        for model in dict.fromkeys(f.model for s in placement.segments for f in s.feeds):
            for name in names[model].rest:
                if name not in names[self.models.donor].rest:
                    module = donor.module_of(name) if donor.extra(name) else home
                    if module == placement.module:
                        listed[name] = None
        return list(listed)

    def _outside(self, name: str, segment: Segment) -> None:
        """One tensor outside the layers; `name` is the donor's."""
        sources = [self.models.names[f.model].rest.get(name) for f in segment.feeds]
        if self._takes_bytes(name, segment, sources):
            return
        if None in sources:
            self._incomplete(name, segment, sources)
            return
        self._merge_outside(name, segment, sources, sources)

    def _takes_bytes(self, name: str, segment: Segment, sources: Sequence[str | None]) -> bool:
        """Whether several models hold the bytes of a file as a tensor, of other lengths: then one of them is taken.

        ComfyUI's UMT5 has its tokenizer so. From a GGUF file it is put together from keys, without what those leave out.
        """
        places = [k for k in self._listed(name, segment, sources) if sources[k] is not None]
        reads = {k: Read(segment.feeds[k].model, sources[k] or "") for k in places}
        specs = {k: self.models.names[read.model].specs[read.tensor] for k, read in reads.items()}
        stored = self.models.names[self.models.donor].specs.get(name)  # its model may have weight 0
        all_specs = [*specs.values(), *([] if stored is None else [stored])]
        if not places or len({spec.shape for spec in all_specs}) < 2:
            return False
        if any(spec.dtype.name != "U8" or len(spec.shape) != 1 for spec in all_specs):
            return False
        taken = min(
            places,
            key=lambda k: (not self.models.as_stored(reads[k].model, reads[k].tensor), reads[k].model != self.models.donor, k),
        )
        label = self.models.labels[reads[taken].model]
        details = tuple(f"{self.models.labels[reads[k].model]}: {spec.nbytes:,} bytes" for k, spec in specs.items())
        self.warnings.append(Finding(f"bytes of a file are not merged; taken from {label}", name, details))
        for feed, source in zip(segment.feeds, sources, strict=True):
            if source is not None and feed.model != reads[taken].model:
                self.account.drop(feed.model, source, f"bytes of a file, taken from {label}")
        self._copy(name, reads[taken].model, reads[taken].tensor)
        return True

    def _merge_outside(self, name: str, segment: Segment, sources: Sequence[str | None], filled: Sequence[str | None]) -> None:
        """One tensor outside the layers. filled: with what models that do not store it use in its place."""
        places = self._listed(name, segment, filled)
        first = segment.feeds[places[0]].model
        if (source := filled[places[0]]) is not None:
            self._note_head(name, segment, sources, places, self.models.names[first].specs[source])
            self._compare(name, segment, first, source)
            self._check_vocabulary(name, segment, places, self.models.names[first].specs[source])
        self._merge(self._numbered(name), segment, filled, 0.0)

    def _listed(self, name: str, segment: Segment, sources: Sequence[str | None]) -> tuple[int, ...]:
        """Places of the inputs that count for a tensor outside the layers: their weight is not 0."""
        index = self.resolver.index(segment, self._numbered(name), [s or name for s in sources], 0.0)
        return self.resolver.listed(index, base=segment.base)

    def _check_vocabulary(self, name: str, segment: Segment, places: Sequence[int], spec: TensorSpec) -> None:
        """Report a table with fewer tokens than the donor's, whose tokenizer is taken although its weight is 0."""
        donor = next((k for k, f in enumerate(segment.feeds) if f.model == self.models.donor and k not in places), None)
        donor_spec = None if donor is None else self._rest_specs(self.models.donor).get(name)
        if (
            donor is None
            or donor_spec is None
            or not self.models.tokenizes
            or not vocabulary.has_tokens(donor_spec, self._rows)
        ):
            return
        if donor_spec.shape[0] > spec.shape[0]:
            self.mismatches.unequal(name, segment, {donor: donor_spec, places[0]: spec})

    def _compare(self, name: str, segment: Segment, model: int, source: str) -> None:
        """Report a tensor outside the layers that the donor's config.json cannot express. `vocab_size` follows the tensors."""
        donor = self.models.donor
        donor_spec, spec = self._rest_specs(donor).get(name), self.models.names[model].specs[source]
        if donor_spec is None or donor_spec.shape == spec.shape or vocabulary.has_tokens(donor_spec, self._rows):
            return
        self.mismatches.unlike_donor(name, segment, spec, model, donor_spec, donor)

    def _numbered(self, name: str) -> str:
        """The output name: extra layers follow the others, however many there are now."""
        extra = self.donor.extra(name) if self.layers else None
        if extra is None or extra[0].prefix not in self.layers:
            return name
        return self.donor.rename(name, len(self.layers[extra[0].prefix]) + extra[1])

    def _incomplete(self, name: str, segment: Segment, sources: list[str | None]) -> None:
        """A tensor that not all the models store: a buffer, a tied copy, a module of one model, or a mismatch."""
        spec = self._example(name, segment)
        if is_buffer(spec):
            self.account.drop_everywhere(name, "a buffer that the model computes for itself, and not all inputs store it")
            return
        if self._classifies and is_task_head(name):
            self._average(name, segment, sources)
            return
        if self._classifies and is_other_head(name):
            self.account.drop_everywhere(name, "the output has the head of a classifier")
            return
        donor, places = self.models.names[self.models.donor], self._listed(name, segment, sources)
        feeds, stored = [segment.feeds[k] for k in places], [sources[k] for k in places]
        if any(sources) and not any(stored) and name not in donor.rest:  # as if the models that have it were not listed
            self._drop_unlisted(segment, sources, places)
            return
        filled = [
            s or (self._stand_in(spec, f) if k in places else None)
            for k, (f, s) in enumerate(zip(segment.feeds, sources, strict=True))
        ]
        if all(filled[k] is not None for k in places):
            if self._redundant(name, spec, feeds, stored):
                self.account.drop_everywhere(name, "a copy of the tensor it is tied to; not all inputs store it")
                self._warn_redundant(name, feeds, stored)
                self._note_copies(spec, feeds, stored)
                return
            self._note_lent(spec, segment, sources, filled)
            self._merge_outside(name, segment, sources, filled)
            return
        self._drop_unlisted(segment, sources, places)
        owners = [(f, s) for f, s in zip(feeds, stored, strict=True) if s is not None]
        others = [f for f, s in zip(feeds, stored, strict=True) if s is None]
        if not owners and name in donor.rest and segment.feeds:
            owners = [(SegmentInput(self.models.donor, 0, None, {}, segment.where), donor.rest[name])]
        if not owners:
            return  # only models of other slices have it: the account says so
        if len(owners) == 1 and not any(self._has_module(f, name, owners[0]) for f in others):
            self._compare(name, segment, owners[0][0].model, owners[0][1])
            self._own(self._numbered(name), owners[0][0].model, owners[0][1])
        else:
            self.mismatches.missing(name, segment, places, sources)

    def _drop_unlisted(self, segment: Segment, sources: Sequence[str | None], places: Sequence[int]) -> None:
        """Leave out what models of weight 0 have. places: of the others."""
        for k, (feed, source) in enumerate(zip(segment.feeds, sources, strict=True)):
            if k not in places and source is not None:
                self.account.drop(feed.model, source, UNREAD)

    def _average(self, name: str, segment: Segment, sources: Sequence[str | None]) -> None:
        """A tensor of a head that the base has not: nothing is a difference from it, so the models' average is taken."""
        names = [source or name for source in sources]
        settings = self.resolver.index(segment, name, names, 0.0)
        by_model = self.resolver.settings[settings].models
        weights = [by_model[k].get("weight", 1.0) if source is not None else 0.0 for k, source in enumerate(sources)]
        weighted = [(k, w) for k, w in enumerate(weights) if isinstance(w, int | float) and w > 0]
        inputs = tuple(Read(segment.feeds[k].model, names[k]) for k, _ in weighted)
        specs = [self.models.names[read.model].specs[read.tensor] for read in inputs]
        if len({spec.shape for spec in specs}) > 1:
            self.mismatches.unequal(name, segment, {k: spec for (k, _), spec in zip(weighted, specs, strict=True)})
            return
        if not weighted or not all(spec.dtype.floating for spec in specs):
            self.mismatches.missing(name, segment, range(len(sources)), sources)
            return
        self._note_origin(name, segment, names, 0.0)
        for feed, source in zip(segment.feeds, sources, strict=True):
            if source is not None:
                self.account.drop(feed.model, source, UNREAD)
        if len(inputs) == 1:
            self._own(name, inputs[0].model, inputs[0].tensor)
            return
        for read in inputs:
            self.account.use(read)
        average = Settings({"normalize": True}, tuple({"weight": float(w)} for _, w in weighted))
        out = TensorSpec(name, self.dtypes.of(inputs), specs[0].shape)
        self.steps.append(Step(out, AVERAGE, inputs, False, self.resolver.add(average)))

    def _example(self, name: str, segment: Segment) -> TensorSpec:
        order = [*(f.model for f in segment.feeds), *range(len(self.models.names))]
        return next(self._rest_specs(m)[name] for m in order if name in self.models.names[m].rest)

    def _rest_specs(self, model: int) -> dict[str, TensorSpec]:
        """A model's tensors outside its layers under the donor's names."""
        if model not in self._rests:
            specs, rest = self.models.names[model].specs, self.models.names[model].rest
            self._rests[model] = {outer: replace(specs[name], name=outer) for outer, name in rest.items()}
        return self._rests[model]

    def _stand_in(self, spec: TensorSpec, feed: SegmentInput) -> str | None:
        model = feed.model
        name = vocabulary.tied_substitute(spec, self._rest_specs(model), self.models.configs[model])
        return self.models.names[model].rest[name] if name is not None else None

    def counterpart(self, name: str, model: int) -> str | None:
        """The model's own name of what it uses as an output tensor outside the layers; None if it has no such tensor."""
        stored = self.models.names[model].rest.get(name)
        if stored is not None:
            return stored
        spec = next((specs[name] for m in range(len(self.models.names)) if name in (specs := self._rest_specs(m))), None)
        return None if spec is None else self._stand_in(spec, SegmentInput(model, 0, None, {}, ""))

    def _has_module(self, feed: SegmentInput, name: str, owner: tuple[SegmentInput, str]) -> bool:
        """True when a model without the tensor `name` has other tensors of its module, perhaps by a tied one."""
        if self.models.names[feed.model].has_module_of(name):
            return True
        weight = self._rest_specs(owner[0].model).get(f"{name.rpartition('.')[0]}.weight")
        return weight is not None and weight.name != name and self._stand_in(weight, feed) is not None

    def _primary(self, spec: TensorSpec) -> str:
        """The name under which tied copies of a tensor are written."""
        return vocabulary.primary(spec, [s for m in range(len(self.models.names)) for s in self._rest_specs(m).values()])

    def _redundant(self, name: str, spec: TensorSpec, feeds: Sequence[SegmentInput], sources: Sequence[str | None]) -> bool:
        """True for a copy of a tied tensor that need not be written, because its other name is."""
        if self._primary(spec) == name:
            return False
        return not vocabulary.is_head(spec) or (self._donor_ties() and all(self._tied(feeds, sources)))

    def _warn_redundant(self, name: str, feeds: Sequence[SegmentInput], sources: Sequence[str | None]) -> None:
        labels = [self.models.labels[f.model] for f, s in zip(feeds, sources, strict=True) if s is not None]
        if labels:
            what = f"tied tensors are written once: the copy in {' and '.join(labels)} is left out"
            fix = "set tie_word_embeddings to false in that model's config.json, if it is a tensor of its own"
            self.warnings.append(Finding(what, name, fix=fix))

    def _note_copies(self, spec: TensorSpec, feeds: Sequence[SegmentInput], sources: Sequence[str | None]) -> None:
        primary = self._primary(spec)
        for feed, source in zip(feeds, sources, strict=True):
            merged = None if source is None else self.counterpart(primary, feed.model)
            if source is not None and merged not in (None, source):
                self.copies.append((feed.model, source, str(merged)))

    def _note_lent(
        self, spec: TensorSpec, segment: Segment, sources: Sequence[str | None], filled: Sequence[str | None]
    ) -> None:
        """An embedding that models lack is merged with another of theirs only if it is a copy of that where it is stored."""
        if vocabulary.is_head(spec) or len(spec.shape) < 2:
            return
        pairs = [(f.model, s, lent) for f, s, lent in zip(segment.feeds, sources, filled, strict=True)]
        lenders = {self.models.names[model].outer[lent] for model, source, lent in pairs if source is None and lent is not None}
        for model, source, _ in pairs:
            others = [self.models.names[model].rest.get(name) for name in lenders]
            self.copies += [(model, source, other) for other in others if source is not None and other not in (None, source)]

    def _tied(self, feeds: Sequence[SegmentInput], sources: Sequence[str | None]) -> list[bool]:
        configs, pairs = self.models.configs, zip(feeds, sources, strict=True)
        return [vocabulary.ties(configs[f.model], stores_head=s is not None) for f, s in pairs]

    def _donor_ties(self) -> bool:
        donor = self.models.donor
        stores_head = any(vocabulary.is_model_head(s) for s in self._rest_specs(donor).values())
        return vocabulary.ties(self.models.configs[donor], stores_head=stores_head)

    def _note_head(
        self, name: str, segment: Segment, sources: Sequence[str | None], places: Sequence[int], spec: TensorSpec
    ) -> None:
        """The head gets a tensor of its own, unless all models tie it to the embedding. places: of those that count."""
        if vocabulary.is_model_head(replace(spec, name=name)):
            tied = self._tied([segment.feeds[k] for k in places], [sources[k] for k in places])
            if not all(tied) and (any(tied) or self._donor_ties()):
                self.untie = True

    def _check_tie(self, placement: Placement) -> None:
        """Embedding and head of a stack come from different slices: say so where the two are one tensor."""
        first, last = placement.segments[0], placement.segments[-1]
        decoder = self.donor.main is not None and self.donor.main.kind == "decoder"
        if {f.model for f in first.feeds} == {f.model for f in last.feeds} or not (decoder and self._donor_ties()):
            return
        if not any(vocabulary.is_model_head(step.out) for step in self.steps):
            labels = " and ".join(dict.fromkeys(self.models.labels[f.model] for f in first.feeds))
            what = f"the head is tied to the embedding, so it comes from {labels} too, not from the last slice"
            self.warnings.append(Finding(what, last.where))

    # ---- models that do not go together -------------------------------------------------------------------------------------

    def _strangers(self, placements: Sequence[Placement]) -> None:
        """Models that share no tensor are of different kinds: a model with the parts of both would be no merge."""
        for segment in {id(s): s for p in placements for s in p.segments}.values():
            models = list(dict.fromkeys(segment.feeds[k].model for k in self._always_listed(segment)))
            if id(segment) in self._merged or len(models) < 2 or segment.broken or self.problems:
                continue
            what, fix = "the models have no tensor in common", "merge models of one architecture"
            details = [_first_name(self.models.labels[m], self.models.names[m].specs) for m in models]
            self._problems.append(MismatchError(what, where=segment.where, details=details, fix=fix))
        for segment in {id(s): s for p in placements for s in p.segments}.values():
            models = list(dict.fromkeys(segment.feeds[k].model for k in self._always_listed(segment)))
            others = [m for m in models if self.models.donor in models and (self._has_other_layers(m) or self._is_renamed(m))]
            if not others or segment.broken or self.problems:
                continue
            what = "the layers of the models have different names, so that none of them would be merged"
            if not self._has_other_layers(others[0]):
                what = "parts of the models are alike except for their names, and both would be copied side by side"
            fix = "merge models of one architecture; load a checkpoint of a training run with transformers, and save it, first"
            details = self._unlike_names(others[0])
            self._problems.append(MismatchError(what, where=segment.where, details=details, fix=fix))

    def _unlike_names(self, model: int) -> list[str]:
        """What the donor and a model call a part that both have, a line each."""
        if self._has_other_layers(model):
            return [self._first_layer(m) for m in (self.models.donor, model)]
        names = self.models.names[model]
        first, second = names.unmatched
        matrices = ((n, m, spec.shape) for n, spec in first.items() for m in second if len(spec.shape) > 1)
        alike = ((n, m) for n, m, shape in matrices if second[m].shape == shape)
        mine, theirs = next(iter(names.lookalikes), None) or next(alike)
        pairs = zip((self.models.donor, model), (theirs, mine), strict=True)
        return [f"{self.models.labels[m]}: {name.rstrip('.')}" for m, name in pairs]

    def _has_other_layers(self, model: int) -> bool:
        """Whether the main layers of a model are none of the donor's, and the donor's none of the model's."""
        names = self.models.names[model]
        main, donor = names.structure.main, self.donor.main
        if main is None or donor is None or not (main.config_paths and donor.config_paths):
            return False
        return donor.prefix not in names.depth and not any(names.paired[main.prefix] == s.prefix for s in self.donor.stacks)

    def _is_renamed(self, model: int) -> bool:
        """Whether parts of a model seem to be the donor's under other names: modules with equal contents, or at least a quarter
        of the model's matrices, if half of what either has alone are of equal shapes.
        """
        names = self.models.names[model]
        if names.lookalikes:
            return True
        if of_other_senses(*names.unmatched):
            return False
        mine, theirs = (Counter(s.shape for s in specs.values() if len(s.shape) > 1) for specs in names.unmatched)
        alike, matrices = (mine & theirs).total(), sum(len(spec.shape) > 1 for spec in names.specs.values())
        return 4 * alike > matrices and 2 * alike > min(mine.total(), theirs.total())

    def _first_layer(self, model: int) -> str:
        names = self.models.names[model]
        assert names.structure.main is not None
        prefix = names.structure.main.prefix
        return f"{self.models.labels[model]}: {next(name for name in names.specs if name.startswith(prefix))}"

    def _note_renamed(self) -> None:
        """Say which modules are merged although their names differ."""
        donor = self.models.labels[self.models.donor]
        for label, names in zip(self.models.labels, self.models.names, strict=True):
            details = tuple(f"{mine.rstrip('.')}: {theirs.rstrip('.')} in {donor}" for mine, theirs in names.renamed)
            if details:
                what = "modules with other names hold the same tensors as modules of the donor, and are merged with them"
                self.warnings.append(
                    Finding(what, label, details, "check the names: parts of different use can be of one size")
                )

    def _note_unread(self) -> None:
        """Say which models' weights are 0 throughout: nothing of them is read."""
        account, labels = self.account, self.models.labels
        unread = [labels[m] for m in range(len(labels)) if not account.used[m] and UNREAD in account.reasons[m].values()]
        if unread:
            what = f"{unread[0]} is not read: its weight is 0 for every tensor"
            if len(unread) > 1:
                what = f"{len(unread)} models are not read: their weights are 0 for every tensor"
            self.warnings.append(Finding(what, details=tuple(unread) if len(unread) > 1 else ()))

    def _note_unused(self) -> None:
        """Say which tensors are not merged because no model uses them."""
        if self._unused:
            donor = self.models.names[self.models.donor].all().values()
            done = f"copied from {self.models.labels[self.models.donor]}" if self._unused[0] in donor else "left out"
            unmerged = f"{count(len(self._unused), 'tensor')} of their own, which not all models store, {done}"
            self.warnings.append(
                Finding(f"the last layers use the keys and values of earlier ones: {unmerged}", self._unused[0])
            )

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def _merge(self, name: str, segment: Segment, sources: Sequence[str | None], t: float) -> None:
        """One merged output tensor, of the models whose weight is not 0. sources: None for a model that lacks it."""
        feeds, names = segment.feeds, [source or name for source in sources]
        settings = self.resolver.index(segment, name, names, t)
        listed = self.resolver.listed(settings, base=segment.base)
        self._drop_unlisted(segment, sources, listed)
        if any(sources[k] is None for k in listed):
            if any(sources[k] is not None for k in listed):
                self.mismatches.missing(name, segment, listed, sources)
            return
        self._merged.add(id(segment))
        specs = {k: self.models.names[feeds[k].model].specs[names[k]] for k in listed}
        first = specs[listed[0]]
        if any(spec.shape != first.shape for spec in specs.values()):
            self.mismatches.unequal(name, segment, specs)
            return
        inputs = {k: Read(feeds[k].model, names[k]) for k in listed}
        if not all(spec.dtype.floating for spec in specs.values()):
            self._integers(name, list(inputs.values()), list(specs.values()))
            return
        name = first.name if first.name == name else name  # one string serves the step and its inputs
        self._note_origin(name, segment, names, t)
        dtype = self.dtypes.of(list(inputs.values()))
        out = first if first.name == name and first.dtype is dtype else TensorSpec(name, dtype, first.shape)
        settings, places = self.resolver.taken(settings, role_of(out), base=segment.base)
        for k, used in inputs.items():
            if k in places:
                self.account.use(used)
            else:
                self.account.drop(used.model, used.tensor, f"{self.method.name} keeps the base's")
        values, same = self.resolver.settings[settings], dtype == specs[places[0]].dtype
        op = operation(self.method, values, len(feeds), places, base=segment.base, same=same)
        step = Step(out, op, tuple(inputs[k] for k in places), segment.base, settings)
        if step.merges and not self.method.elementwise(values.shared):
            models, model = self.models, feeds[listed[0]].model
            parts = fused_parts(first, models.names[model].specs, models.names[model].structure, models.configs[model], name)
            step = split_fused(step, parts)
        self.steps.append(step)

    def _note_origin(self, name: str, segment: Segment, names: Sequence[str], t: float) -> None:
        """Keep what the parameters of a tensor were looked up with. Tensors of a layer share it if all models use one name."""
        if any(other != name for other in names):
            self.origins[name] = segment, tuple(names), t
        else:
            self.origins[name] = self._shared.setdefault((id(segment), t), (segment, (), t))

    def _integers(self, name: str, inputs: Sequence[Read], specs: Sequence[TensorSpec]) -> None:
        """Integers and booleans are not merged: the base's (else the first model's) are copied, and compared on the way."""
        for source in inputs:
            self.account.use(source)
        k = next((k for k, i in enumerate(inputs) if i.model == self.models.base), 0)
        order = [k, *(i for i in range(len(inputs)) if i != k)]
        inputs, specs = tuple(inputs[i] for i in order), [specs[i] for i in order]
        label = self.models.labels[inputs[0].model]
        if any(s.dtype != specs[0].dtype for s in specs):
            details = tuple(f"{self.models.labels[i.model]}: {s}" for i, s in zip(inputs, specs, strict=True))
            self.warnings.append(Finding(f"dtypes differ and are not all floating; taken from {label}", name, details))
            for other in inputs[1:]:
                self.account.used[other.model].discard(other.tensor)
                self.account.drop(other.model, other.tensor, f"no floating numbers to merge: taken from {label}")
            inputs = inputs[:1]
        self.steps.append(Step(TensorSpec(name, specs[0].dtype, specs[0].shape), COPY, tuple(inputs)))

    def _own(self, name: str, model: int, source: str) -> None:
        """An output tensor that only one model has."""
        self.account.copied[model].append(name)
        self._copy(name, model, source)

    def _copy(self, name: str, model: int, source: str) -> None:
        """One output tensor that is another's bytes, or a cast of it."""
        spec = self.models.names[model].specs[source]
        read = Read(model, source)
        dtype = self.dtypes.of([read]) if spec.dtype.floating else spec.dtype
        self.account.use(read)
        self.steps.append(Step.copy(TensorSpec(name, dtype, spec.shape), read, spec.dtype))


def _first_name(label: str, specs: Specs) -> str:
    name = next((n for n in specs if re.search(r"\.\d+\.", n)), next(iter(specs)))
    return f"{label}: {name}"
