"""Problems of a recipe's parameters that do not depend on the models: names, places, values, missing ones."""

from __future__ import annotations

from collections.abc import Sequence

from weightsmith._base.errors import Finding, ParameterError, UnknownParameter, WeightsmithError, nearest, nearest_names
from weightsmith._methods.base import Method, Parameter
from weightsmith._planning.planner.parameters import coerce
from weightsmith._planning.planner.segments import Segment, SegmentInput
from weightsmith._planning.recipe import HARMLESS, OPTIONS, SCHEDULED, Entry, Parameters, Schedule, Setting


class Audit:
    """Looks at every parameter that the segments of a recipe can see, once.

    lenient  what mergekit ignores is a warning, not an error
    wrong    ids of the entries whose value is reported
    """

    def __init__(self, method: Method, labels: Sequence[str], where: str, *, lenient: bool) -> None:
        self.method = method
        self.labels = labels
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
    from weightsmith._methods.describe import example_value, values

    allowed = values(parameter).replace(" | ", " or ").replace("number 0 to", "number from 0 to")
    if parameter.kind in ("float", "int") and not parameter.choices:
        allowed = f"a {allowed}, such as {parameter.name}: {example_value(parameter)}"
    fix = f"use {allowed}"
    return ParameterError(f"{parameter.name} {error}, not {value!r}", where=entry.where, fix=fix)
