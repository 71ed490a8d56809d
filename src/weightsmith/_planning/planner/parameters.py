"""What each parameter is for each tensor and model, and where the recipe says so.

A parameter of one model is looked up at its own entry, then slice, module, recipe; one of the whole tensor at slice, module,
recipe. At each level the first entry whose filter fits the tensor's name counts; filters of a model's parameter look at the
name in that model, those of a shared one at the output name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from weightsmith._base.errors import Finding, ParameterError, UnknownParameter, WeightsmithError, nearest, nearest_names
from weightsmith._methods.method import Method, Parameter, example_value, values_text
from weightsmith._planning.planner.segments import Segment, SegmentInput
from weightsmith._planning.recipe import HARMLESS, OPTIONS, SCHEDULED, Entry, Parameters, Scalar, Schedule, Setting, numeric
from weightsmith._plans import Role, Settings, Value


@dataclass(frozen=True, slots=True)
class Origin:
    """A parameter's value for one tensor and where it comes from: a position in the recipe, or `default`."""

    parameter: str
    model: int | None
    value: Value | None
    where: str


def coerce(parameter: Parameter, value: Scalar) -> Value:
    """The value as the parameter's kind. Raises ValueError with the problem.

    >>> coerce(Parameter("normalize", "bool", ""), 1.0)
    True
    """
    number = numeric(value)
    if parameter.kind == "bool":
        if isinstance(value, bool):
            return value
        if number in (0, 1):
            return bool(number)
        raise ValueError("must be true or false")
    if parameter.kind == "str":
        if isinstance(value, bool) and parameter.booleans:
            return parameter.booleans[value]
        if number in (0, 1) and parameter.booleans:
            return parameter.booleans[int(number)]
        return _allowed(parameter, str(value))
    if number is None:
        raise ValueError("must be a number")
    if parameter.kind == "int" and number != int(number):
        raise ValueError("must be a whole number")
    return _allowed(parameter, int(number) if parameter.kind == "int" else float(number))


def _allowed(parameter: Parameter, value: Value) -> Value:
    if problem := parameter.problem(value):
        raise ValueError(problem)
    return value


def listed(method: Method, settings: Settings, *, base: bool) -> tuple[int, ...]:
    """Places of the inputs of a tensor that count: not those of weight 0, which are as good as not listed.

    base  the first input is the base

    (0,), the base alone, when no model's weight is another. All inputs where the method needs more than are left, or there is
    no base.
    """
    places = tuple(k for k, values in enumerate(settings.models) if not method.ignored(values))
    count = len(places) - base
    enough = count >= method.min_models or (base and count == 0 and method.min_models == 1)
    return places if enough else tuple(range(len(settings.models)))


def taking_part(method: Method, settings: Settings, role: Role, *, base: bool) -> tuple[int, ...]:
    """Places of the inputs that take part in the merge of a tensor: those that count.

    base  the first input is the base

    (0,), the base alone, where the method leaves tensors of this role to the base.

    >>> from weightsmith import _methods as methods
    >>> taking_part(methods.get("ties"), Settings({}, ({}, {"weight": 0.0}, {"weight": 1.0})), "linear", base=True)
    (0, 2)
    """
    return (0,) if base and method.keeps_base(settings.shared, role) else listed(method, settings, base=base)


def without(settings: Settings, places: Sequence[int]) -> Settings:
    """The settings of the inputs at these places alone."""
    return Settings(settings.shared, tuple(settings.models[k] for k in places), tuple(places))


Place = tuple[int, int]
"""A number among so many, counted from 0."""


class Lookup:
    """One parameter of one feed (or of the tensor), with the levels at which it may be given.

    places  for each level the feed's place among those over which a schedule written there spreads, and how many they are
    """

    __slots__ = ("_places", "_stepped", "constant", "parameter", "settings")

    def __init__(self, parameter: Parameter, levels: Sequence[Parameters], places: Sequence[Place] = ()) -> None:
        self.parameter = parameter
        self._stepped = parameter.kind in ("bool", "str")
        self.settings: tuple[Setting, ...] = tuple(level[parameter.name] for level in levels if parameter.name in level)
        self._places = {id(level.get(parameter.name)): place for level, place in zip(levels, places, strict=False)}
        self.constant: tuple[Scalar | None, Entry | None] | None = None
        if not self.settings:
            self.constant = None, None
        else:
            entry = self.settings[0].entries[0] if self.settings[0].entries else None
            if entry is not None and entry.filter in (None, "*") and not isinstance(entry.value, tuple):
                self.constant = self._plain(entry.value, self.settings[0]), entry

    def find(self, name: str, t: float) -> tuple[Scalar | None, Entry | None]:
        """Value and entry for a tensor; (None, None) when no level says anything."""
        if self.constant is not None:
            return self.constant
        for setting in self.settings:
            entry = setting.at(name, t, stepped=self._stepped)
            if entry is not None:
                return self._plain(entry[0], setting), entry[1]
        return None, None

    def _plain(self, value: Scalar | Schedule | tuple[Scalar, ...], setting: Setting) -> Scalar | None:
        """A schedule's weight for this feed, any other value as it is; None for a schedule that has been refused."""
        assert not isinstance(value, tuple)
        if not isinstance(value, Schedule):
            return value
        place, count = self._places.get(id(setting), (0, 0))
        try:
            return value.weights(count)[place] if count else None
        except ValueError:
            return None


class Resolver:
    """Parameters of all tensors of a recipe; equal sets are stored once, in `settings`.

    wrong  ids of entries whose value is reported already
    """

    def __init__(self, method: Method, model_names: Sequence[str], wrong: Collection[int] = ()) -> None:
        self.method = method
        self.model_names = model_names
        self.wrong = set(wrong)
        self.settings: list[Settings] = [Settings({}, ())]
        self.problems: list[WeightsmithError] = []
        self._shared = [p for p in method.parameters if p.scope == "tensor"]
        self._own = [p for p in method.parameters if p.scope == "model"]
        self._interned: dict[object, int] = {}
        self._lookups: dict[int, tuple[list[Lookup], list[list[Lookup]]]] = {}
        self._constants: dict[int, int] = {}
        self._taken: dict[tuple[int, tuple[int, ...]], int] = {}
        self._used: set[int] = set()
        self._values: dict[tuple[str, object, type, int], Value | None] = {}
        self._listed: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._taking_part: dict[tuple[int, Role, bool], tuple[int, ...]] = {}
        self._missing: dict[tuple[str, int | None], tuple[Lookup, str]] = {}
        self._kept: list[Segment] = []  # ids of segments are keys: the segments must live as long

    def _lookup(self, segment: Segment) -> tuple[list[Lookup], list[list[Lookup]]]:
        lookups = self._lookups.get(id(segment))
        if lookups is None:
            shared = [Lookup(p, segment.levels) for p in self._shared]
            first = 1 if segment.base else 0
            by_feed: list[list[Lookup]] = [[]] * first
            for k, feed in enumerate(segment.feeds[first:]):
                places = [feed.matched or (0, 1), *[(k, len(segment.feeds) - first)] * len(segment.levels)]
                by_feed.append([Lookup(p, (feed.parameters, *segment.levels), places) for p in self._own])
            lookups = self._lookups[id(segment)] = shared, by_feed
            self._kept.append(segment)
        return lookups

    def index(self, segment: Segment, out_name: str, names: Sequence[str], t: float) -> int:
        """Index into `settings` of the parameters of one output tensor; `names` are its names in the feeds' models."""
        constant = self._constants.get(id(segment))
        if constant is not None:
            return constant
        shared, by_feed = self._lookup(segment)
        values = [self._value(u, u.find(out_name, t), None, out_name) for u in shared]
        models = [
            [self._value(u, u.find(name, t), segment.feeds[k].model, name) for u in lookups]
            for k, (lookups, name) in enumerate(zip(by_feed, names, strict=True))
        ]
        key = (tuple(values), tuple(tuple(m) for m in models))
        index = self._interned.get(key)
        if index is None:
            index = self._interned[key] = len(self.settings)
            self._add_settings(segment, values, models)
        if all(u.constant is not None for u in shared) and all(u.constant is not None for us in by_feed for u in us):
            self._constants[id(segment)] = index
        return index

    def _add_settings(self, segment: Segment, values: list[Value | None], models: list[list[Value | None]]) -> None:
        shared = {p.name: v for p, v in zip(self._shared, values, strict=True)}
        by_model = tuple({p.name: v for p, v in zip(self._own, m, strict=True)} if m else {} for m in models)
        optional = {p.name for p in self.method.parameters if p.optional}
        complete = all(v is not None or name in optional for values_of in (shared, *by_model) for name, v in values_of.items())
        if complete and (wrong := self.method.check(shared, by_model)):
            self.problems.append(ParameterError(wrong, where=segment.where))
        self.settings.append(Settings(shared, by_model))

    def _value(self, lookup: Lookup, written: tuple[Scalar | None, Entry | None], model: int | None, name: str) -> Value | None:
        value, entry = written
        parameter = lookup.parameter
        if value is None:
            # A parameter that no level gives at all has been reported, with the place where it belongs.
            if entry is None and parameter.required and lookup.settings and not any(s.reported for s in lookup.settings):
                self._missing.setdefault((parameter.name, model), (lookup, name))
            return parameter.default
        self._used.add(id(entry))
        key = (parameter.name, value, type(value), id(entry))
        if key not in self._values:
            try:
                self._values[key] = coerce(parameter, value)
            except ValueError as error:
                self._values[key] = None
                assert entry is not None
                if id(entry) not in self.wrong:  # a whole number that a gradient makes a fraction
                    self.wrong.add(id(entry))
                    what = f"{parameter.name} {error}, not {value!r}"
                    fix = "write one number: a gradient is interpolated between its values"
                    self.problems.append(ParameterError(what, where=entry.where, fix=fix))
        return self._values[key]

    def listed(self, index: int, *, base: bool) -> tuple[int, ...]:
        """Places of the inputs that count under the settings; see `listed`."""
        key = index, base
        if key not in self._listed:
            self._listed[key] = listed(self.method, self.settings[index], base=base)
        return self._listed[key]

    def always_listed(self, segment: Segment) -> tuple[int, ...]:
        """The same for whole segments: not the inputs whose weight is 0 for every tensor, without filters and gradients."""
        _, by_feed = self._lookup(segment)
        constants = [
            {u.parameter.name: self._value(u, u.constant, feed.model, "") for u in lookups if u.constant is not None}
            for feed, lookups in zip(segment.feeds, by_feed, strict=True)
        ]
        known = [{name: value for name, value in values.items() if value is not None} for values in constants]
        return listed(self.method, Settings({}, tuple(known)), base=segment.base)

    def add(self, settings: Settings) -> int:
        """The index of settings that do not follow from the recipe alone."""
        self.settings.append(settings)
        return len(self.settings) - 1

    def taken(self, index: int, role: Role, *, base: bool) -> tuple[int, tuple[int, ...]]:
        """The settings with those inputs alone that take part, and the places of these; see `taking_part`."""
        key = index, role, base
        if key not in self._taking_part:
            self._taking_part[key] = taking_part(self.method, self.settings[index], role, base=base)
        places = self._taking_part[key]
        if len(places) == len(self.settings[index].models):
            return index, places
        if (index, places) not in self._taken:
            self.settings.append(without(self.settings[index], places))
            self._taken[index, places] = len(self.settings) - 1
        return self._taken[index, places], places

    def explain(self, segment: Segment, out_name: str, names: Sequence[str], t: float) -> list[Origin]:
        """Every parameter's value for one tensor, with its origin."""
        shared, by_feed = self._lookup(segment)
        lookups: list[tuple[Lookup, int | None, str]] = [(u, None, out_name) for u in shared]
        lookups += [(u, segment.feeds[k].model, n) for k, (us, n) in enumerate(zip(by_feed, names, strict=True)) for u in us]
        origins = []
        for u, model, name in lookups:
            value = u.find(name, t)
            where = value[1].where if value[1] is not None else "default"
            origins.append(Origin(u.parameter.name, model, self._value(u, value, model, name), where))
        return origins

    def finish(self) -> tuple[list[WeightsmithError], list[Finding]]:
        """Problems found, and warnings about filters and settings that decide nothing."""
        for (parameter, model), (lookup, tensor) in self._missing.items():
            whose = "" if model is None else f" for {self.model_names[model]}"
            what = f"'{parameter}'{whose} has no value for {tensor}: no filter fits it"
            fix = "add an entry without a filter, last in the list: it holds for the rest"
            self.problems.append(ParameterError(what, where=lookup.settings[0].where, fix=fix))
        return self.problems, list(self._idle())

    def _idle(self) -> Iterator[Finding]:
        settings: dict[int, tuple[Parameter, Setting]] = {}
        for shared, by_feed in self._lookups.values():
            for lookup in [*shared, *(u for us in by_feed for u in us)]:
                settings.update({id(s): (lookup.parameter, s) for s in lookup.settings})
        for parameter, setting in settings.values():
            idle = [e for e in setting.entries if id(e) not in self._used]
            filtered = [e for e in idle if e.filter not in (None, "*")]  # "the rest" may be empty
            if idle and idle == list(setting.entries) and not filtered and not parameter.ignored:
                what = f"{parameter.name} here decides for no tensor: nearer values are used for all of them"
                yield Finding(what, setting.where, fix="remove it")
            for entry in filtered:
                what = f"the filter '{entry.filter}' of {parameter.name} decides for no tensor"
                fix = "check its spelling and place: a filter is a part of a tensor name, and the first that fits counts"
                yield Finding(what, entry.filter_where or entry.where, fix=fix)


# ---- parameters that are unknown, misplaced, wrong or missing, whatever the models hold


class Audit:
    """Looks at every parameter that the segments of a recipe can see, once.

    lenient  what mergekit ignores is a warning, not an error
    wrong    ids of the entries whose value is reported
    """

    def __init__(self, method: Method, where: str, *, lenient: bool) -> None:
        self.method = method
        self.where = where
        self.lenient = lenient
        self.problems: list[WeightsmithError] = []
        self.warnings: list[Finding] = []
        self.wrong: set[int] = set()
        self._known = {p.name: p for p in method.parameters}
        self._seen: set[int] = set()
        self._misspelled: dict[int, set[str]] = {}  # id of a `parameters:` block → parameters that are meant by others

    def run(self, segments: Sequence[Segment]) -> None:
        """Check the parameters of all segments."""
        self.look(segments)
        for segment in segments:
            self._schedules(segment)
        self._missing(segments)

    def look(self, segments: Sequence[Segment]) -> None:
        """Check each parameter by itself: its name, place and values."""
        for segment in segments:
            for k, feed in enumerate(segment.feeds):
                self._level(feed.parameters, "base" if segment.base and k == 0 else "model")
            for level in segment.levels:
                self._level(level, "")

    def _level(self, settings: Parameters, place: str) -> None:
        """One `parameters:` block. place: `model`, `base`, or "" for one that holds for all models."""
        if id(settings) in self._seen:
            return
        self._seen.add(id(settings))
        for name, setting in settings.items():
            parameter = self._known.get(name)
            if parameter is None and name in HARMLESS:
                self.warnings.append(Finding(HARMLESS[name], setting.where, fix="remove it"))
            elif parameter is None:
                self._misspelled.setdefault(id(settings), set()).update(close := nearest_names(name, self._known))
                known = f"write one of {', '.join(self._known)}" if self._known else "remove it"
                no = f"merge_method {self.method.name} has no" if self.method.name else "no merge method has a"
                what = f"{no} parameter '{name}'{nearest(name, self._known)}"
                option = OPTIONS.get(name.replace("-", "_"))
                fix = (
                    f"remove it and pass {option} on the command line" if option else f"write '{close[0]}'" if close else known
                )
                self._misused(UnknownParameter(f"{what}; mergekit ignores it", where=setting.where, fix=fix))
            elif place == "base" and parameter.scope == "model":
                what = f"{name} has no effect here: the base has no {name}"
                self.warnings.append(Finding(what, setting.where, fix="remove it"))
            elif place and parameter.scope == "tensor":
                what = f"'{name}' applies to the whole merge, not to one model; mergekit ignores it here"
                fix = "move it to 'parameters:' at the top level, or in the slice"
                self._misused(ParameterError(what, where=setting.where, fix=fix))
            else:
                if parameter.ignored:
                    self.warnings.append(Finding(f"{name} has no effect: {parameter.ignored}", setting.where))
                self._values(parameter, setting)

    def _misused(self, problem: WeightsmithError) -> None:
        if self.lenient:
            self.warnings.append(problem.finding)
        else:
            self.problems.append(problem)

    def _values(self, parameter: Parameter, setting: Setting) -> None:
        for entry in setting.entries:
            if isinstance(entry.value, Schedule):
                if parameter.name != SCHEDULED or parameter.scope != "model":
                    self._wrong(entry, f"{parameter.name} takes no schedule: that is for the weights of models")
                continue
            for value in entry.value if isinstance(entry.value, tuple) else (entry.value,):
                try:
                    coerce(parameter, value)
                except ValueError as error:
                    self.wrong.add(id(entry))
                    self.problems.append(wrong_value(parameter, error, value, entry))
                    break

    def _schedules(self, segment: Segment) -> None:
        """Check that the schedules a segment can see have models to spread over."""
        parameter = self._known.get(SCHEDULED)
        if parameter is None or parameter.scope != "model":
            return
        feeds = segment.feeds[1 if segment.base else 0 :]
        for feed in feeds:
            for entry in _scheduled(feed.parameters):
                if feed.matched is None:
                    fix = "write it under 'parameters:' at the top level, where it spreads over all models, oldest first"
                    self._wrong(entry, "a schedule spreads over the models of a pattern, and this entry is one model", fix)
                else:
                    self._spread(entry, feed.matched[1])
        for entry in (e for level in segment.levels for e in _scheduled(level)):
            if any(f.appended for f in feeds):
                what = f"the base_model counts as one more input of {self.method.name}, and it has no place in the schedule"
                self._wrong(entry, what, "list it under 'models' where it belongs in the run, or remove base_model")
            else:
                self._spread(entry, len(feeds))

    def _spread(self, entry: Entry, count: int) -> None:
        assert isinstance(entry.value, Schedule)
        try:
            entry.value.weights(count)
        except ValueError as error:
            self._wrong(entry, str(error))

    def _wrong(self, entry: Entry, what: str, fix: str = "") -> None:
        self.wrong.add(id(entry))
        self.problems.append(ParameterError(what, where=entry.where, fix=fix))

    def _missing(self, segments: Sequence[Segment]) -> None:
        """Required parameters that no level gives at all (one that its filters leave out shows tensor by tensor)."""
        for parameter in self.method.parameters:
            if not parameter.required:
                continue
            if parameter.scope == "tensor":
                without = [s for s in segments if not self._gives(parameter.name, s.levels)]
                if len(without) == len(segments):
                    self._needed(parameter, self.where, "at the top level")
                else:
                    for segment in without:
                        self._needed(parameter, segment.where, "in the slice, or at the top level")
                continue
            seen: set[int] = set()
            for segment in segments:
                if self.method.base == "required" and not segment.base:
                    continue  # reported; which of the models is the base, and needs none, is not known
                for feed in segment.feeds[1 if segment.base else 0 :]:
                    levels = (feed.parameters, *segment.levels)
                    if feed.model not in seen and not self._gives(parameter.name, levels):
                        seen.add(feed.model)
                        self._needed(parameter, feed.where, "in its entry, or at the top level", feed)

    def _gives(self, name: str, levels: Sequence[Parameters]) -> bool:
        """True if one of the levels gives the parameter, or misspells it, which is reported."""
        return any(name in level or name in self._misspelled.get(id(level), ()) for level in levels)

    def _needed(self, parameter: Parameter, where: str, place: str, feed: SegmentInput | None = None) -> None:
        what, details = f"merge_method {self.method.name} needs the parameter '{parameter.name}'", []
        if feed is not None:
            what += " for each model"
        if feed is not None and feed.appended:
            details = [f"the base_model counts as one more input of {self.method.name}"]
            place = "at the top level, or list the base under 'models' with parameters of its own"
        fix = f"write parameters: {{{parameter.name}: 0.5}} {place}"
        self.problems.append(ParameterError(what, where=where, details=details, fix=fix))


def _scheduled(parameters: Parameters) -> list[Entry]:
    """The schedules that a `parameters:` block gives for the weight."""
    setting = parameters.get(SCHEDULED)
    return [e for e in setting.entries if isinstance(e.value, Schedule)] if setting is not None else []


def wrong_value(parameter: Parameter, error: ValueError, value: object, entry: Entry) -> ParameterError:
    """The problem of a value that `coerce` refuses."""
    allowed = values_text(parameter).replace(" | ", " or ").replace("number 0 to", "number from 0 to")
    if parameter.kind in ("float", "int") and not parameter.choices:
        allowed = f"a {allowed}, such as {parameter.name}: {example_value(parameter)}"
    fix = f"use {allowed}"
    return ParameterError(f"{parameter.name} {error}, not {value!r}", where=entry.where, fix=fix)
