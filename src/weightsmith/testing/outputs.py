"""The tests that every target of outputs must pass.

class TestMyStore(OutputTests):
    @pytest.fixture
    def case(self, tmp_path):
        store = start_my_store()
        return OutputCase(lambda: MyTarget(store, "models/out"), lambda: store.files("models/out"), store.put)

    run_histories(lambda: my_case(), histories=50)

`run_histories` compares an output with a perfect model: writing, kills, resuming, publishing, a second writer, a full disk. It
needs hypothesis. Whatever happens, in any order: nothing is lost, nothing is half published, nothing of others is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from weightsmith._base.errors import Busy, CannotResume, CheckpointError, Corrupt, NoSpace, NotFound, OutputExists, StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import Layout, Naming, make_layout
from weightsmith._outputs import disk
from weightsmith._outputs.checksum import combine, grain_bytes, hash_grains
from weightsmith._outputs.hub_repository import BranchMoved
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.staging import Staging
from weightsmith._plans import Product
from weightsmith.abc.output import Finished, OutputSpec, Target

_SPECS = [
    TensorSpec("a", DTYPES["BF16"], (30, 8)),
    TensorSpec("b", DTYPES["F32"], (40,)),
    TensorSpec("empty", DTYPES["F16"], (0, 4)),
    TensorSpec("inner/w", DTYPES["F32"], (5,)),
    TensorSpec("z", DTYPES["BF16"], (30, 8)),
]
_NAMING = Naming("diffusion_pytorch_model", folders=("inner",))
NAMES = tuple(spec.name for spec in _SPECS)
_PRODUCT = Product("sums", "sums", (TensorSpec("sums.0", DTYPES["F32"], (3,)),), {})


@dataclass(frozen=True, slots=True)
class OutputCase:
    """A target to test.

    target  where nothing is; the same one each time
    files  the files that are visible there, by relative name
    put    write a file there, as another program does; given its relative name
    fails  a context in which the n-th change from now on raises this, for `run_histories`; None: there is no such way
    """

    target: Callable[[], Target]
    files: Callable[[], Mapping[str, bytes]]
    put: Callable[[str, bytes], object]
    fails: Callable[[int, BaseException], AbstractContextManager[object]] | None = None


class OutputTests:
    """The tests. A subclass defines a fixture `case`, an `OutputCase`; pytest does not collect this class itself."""

    def test_what_is_written_in_any_order_is_published(self, case: OutputCase) -> None:
        names = NAMES if case.target().streams else NAMES[::-1]
        with _open(case) as staging:
            write_tensors(staging, names)
            staging.add_file("config.json", b"{}")
            staging.publish({"recipe": "none"})
            assert not staging.is_open
        _check(case, extra={"config.json": b"{}"})

    def test_nothing_is_visible_before_it_is_published(self, case: OutputCase) -> None:
        before = _visible(case)
        with _open(case) as staging:
            write_tensors(staging)
            staging.add_file("config.json", b"{}")
            assert _visible(case) == before
        assert _visible(case) == before

    def test_interrupted_work_is_resumed(self, case: OutputCase) -> None:
        with _open(case) as staging:
            write_tensors(staging, ["a", "b"])
        with _open(case) as staging:
            assert staging.finished <= {"a", "b"}
            write_tensors(staging)
            staging.publish({})
        _check(case)

    def test_work_of_another_plan_is_not_mixed(self, case: OutputCase) -> None:
        with _open(case) as staging:
            staging.keep(_PRODUCT, [np.ones(3, np.float32)])
            write_tensors(staging, seed=1)
        with _open(case) as staging:  # some backends keep less than was finished
            held = staging.holds_work
        if held:
            with _raises(CannotResume), _open(case, plan_hash="other"):
                pass
        with _open(case, plan_hash="other", resume=False) as staging:
            assert not staging.finished
            assert not staging.products
            write_tensors(staging)
            staging.publish({})
        _check(case)

    def test_products_are_kept_for_the_next_run(self, case: OutputCase) -> None:
        values = np.arange(3, dtype=np.float32)
        with _open(case) as staging:
            staging.product(_PRODUCT)
            arrays = staging.create(_PRODUCT) or [np.zeros(3, np.float32)]
            arrays[0][:] = values
            assert (staging.keep(_PRODUCT, arrays)[0] == values).all()
        with _open(case) as staging:
            kept = staging.product(_PRODUCT)
            assert kept is not None
            assert (kept[0] == values).all()
            staging.forget(_PRODUCT)
            assert staging.product(_PRODUCT) is None

    def test_an_output_that_is_not_complete_is_not_published(self, case: OutputCase) -> None:
        before = _visible(case)
        with _open(case) as staging:
            write_tensors(staging, ["a", "b", "empty"])
            with _raises(StoreError):
                staging.publish({})
        assert _visible(case) == before

    def test_names_places_and_checksums_are_checked(self, case: OutputCase) -> None:
        with _open(case) as staging:
            with _raises(ValueError):
                staging.write("a", 470, np.zeros(11, np.uint8))
            with _raises(KeyError):
                staging.finish("unknown", Finished("0" * 32))
            with _raises(ValueError):
                staging.finish("a", Finished("none"))
            for name in ("../config.json", "model.safetensors", MANIFEST_NAME):
                with _raises(StoreError):
                    staging.add_file(name, b"")
            staging.add_file("config.json", b"{}")
            with _raises(StoreError):
                staging.add_file("config.json", b"{}")

    def test_two_runs_do_not_build_the_same_output(self, case: OutputCase) -> None:
        with _open(case), _raises(Busy), _open(case):
            pass

    def test_overwrite_replaces_what_weightsmith_wrote(self, case: OutputCase) -> None:
        _build(case, seed=1, files={"sub/old.json": b"{}"})  # which the new output lacks
        with _raises(OutputExists), _open(case, plan_hash="other"):
            pass
        _build(case, overwrite=True, plan_hash="other")
        _check(case)

    def test_overwrite_replaces_nothing_else(self, case: OutputCase) -> None:
        _build(case)
        case.put("notes.txt", b"mine")
        before = dict(case.files())
        with _raises(OutputExists), _open(case, plan_hash="other", overwrite=True):
            pass
        with _raises(OutputExists):
            case.target().check_free(overwrite=True, protected=(), reads=(), notes={})
        assert dict(case.files()) == before

    def test_files_that_others_write_meanwhile_are_kept(self, case: OutputCase) -> None:
        with _open(case) as staging:
            write_tensors(staging)
            case.put("notes.txt", b"mine")
            with _raises(StoreError):
                staging.publish({})
        assert case.files()["notes.txt"] == b"mine"

    def test_hostile_names_are_escaped(self, case: OutputCase) -> None:
        case.put("a\x1b[2J, mine\n", b"")
        case.put("b" * 200 + "\x1b", b"")
        for overwrite in (False, True):
            with _raises(OutputExists) as caught:
                _open(case, overwrite=overwrite).close()
            assert "\x1b" not in caught[0]
            assert len(caught[0]) < 1000

    def test_verify_names_files_that_a_loader_would_take_for_the_models(self, case: OutputCase) -> None:
        _build(case)
        case.put("model-more.safetensors", b"")
        with _raises(Corrupt) as caught:
            case.target().verify(threads=1, progress=None)
        assert "model-more.safetensors" in caught[0]

    def test_discarded_work_is_gone(self, case: OutputCase) -> None:
        with _open(case) as staging:
            write_tensors(staging, ["a", "b"])
            staging.discard()
        with _open(case, plan_hash="other") as staging:
            assert not staging.finished


@contextmanager
def _raises(kind: type[Exception]) -> Iterator[list[str]]:
    """The text of the error, at the end. pytest is not needed to import this module."""
    caught: list[str] = []
    try:
        yield caught
    except kind as error:
        caught.append(str(error))
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def _visible(case: OutputCase) -> dict[str, bytes]:
    """The files there; without the weights of an unfinished output if these may be there before it is published."""
    files = dict(case.files())
    if case.target().publication != "requests" or MANIFEST_NAME in files:
        return files
    return {name: data for name, data in files.items() if not name.endswith(".safetensors")}


def layout_of_tests() -> Layout:
    """Three small files, one in a subfolder."""
    return make_layout(_SPECS, 600, naming=_NAMING)


def _open(case: OutputCase, *, plan_hash: str = "plan", resume: bool = True, overwrite: bool = False) -> Staging:
    spec = OutputSpec(layout_of_tests(), plan_hash, resume=resume, overwrite=overwrite, message="a model")
    return Staging.open(case.target(), spec)


def tensor_data(spec: TensorSpec, seed: int = 0) -> np.ndarray:
    """The bytes of a tensor."""
    return np.random.default_rng([seed, *spec.name.encode()]).integers(0, 256, spec.nbytes, dtype=np.uint8)


def write_tensors(staging: Staging, names: Iterable[str] = NAMES, seed: int = 0) -> None:
    """Write and finish those of these tensors that are not finished, each from its second half on."""
    specs = {spec.name: spec for spec in _SPECS}
    for name in names:
        if name not in staging.finished:
            raw = tensor_data(specs[name], seed)
            staging.write(name, raw.size // 2, raw[raw.size // 2 :])
            staging.write(name, 0, raw[: raw.size // 2])
            staging.finish(name, Finished(combine(hash_grains(raw, grain_bytes(specs[name])))))


def _build(
    case: OutputCase,
    *,
    plan_hash: str = "plan",
    seed: int = 0,
    overwrite: bool = False,
    files: Mapping[str, bytes] = {},
) -> None:
    with _open(case, plan_hash=plan_hash, overwrite=overwrite) as staging:
        write_tensors(staging, seed=seed)
        for name, data in files.items():
            staging.add_file(name, data)
        staging.publish({})


def _check(case: OutputCase, extra: Mapping[str, bytes] = {}) -> None:
    """The visible files are those of the layout, with the right bytes, and `verify` finds nothing wrong."""
    layout, files = layout_of_tests(), case.files()
    assert {*files} - {".gitattributes"} == {MANIFEST_NAME, *layout.indexes, *extra, *(shard.name for shard in layout.shards)}
    assert {name: files[name] for name in extra} == dict(extra)
    for shard in layout.shards:
        assert files[shard.name].startswith(shard.header)
        for spec in shard.tensors:
            place = layout.places[spec.name]
            assert files[shard.name][place.offset : place.offset + place.nbytes] == tensor_data(spec).tobytes()
    verified = case.target().verify(threads=1, progress=None)
    assert (verified.tensors, verified.extra) == (len(_SPECS), ())


# ---- Histories of an output against a perfect model of it


_PLANS = {"one": 1, "two": 2}
"""Plans, and the seeds of their bytes."""
_CONFIG = b'{"model_type": "tiny"}'
_NOTES = "notes.txt"


class _Killed(BaseException):
    """Ends a run as if its process had been killed."""


def run_histories(new_case: Callable[[], OutputCase], histories: int = 30) -> None:
    """Run so many histories of up to 20 steps each, on targets where nothing is.

    Raises AssertionError with a short history that fails.

    new_case  a new place, with no unfinished work either
    """
    from hypothesis import HealthCheck, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

    is_open = precondition(lambda self: self.staging is not None)
    is_closed = precondition(lambda self: self.staging is None)
    plans, flags, changes = st.sampled_from([*_PLANS]), st.booleans(), st.integers(1, 25)

    class Histories(_History, RuleBasedStateMachine):
        """One history: the steps of `_History`, drawn in any order."""

        def __init__(self) -> None:
            RuleBasedStateMachine.__init__(self)
            _History.__init__(self, new_case())

        open_ = rule(plan=plans, resume=flags, overwrite=flags)(is_closed(_History.open))
        open_full = rule(plan=plans)(is_closed(_History.open_on_a_full_disk))
        ends = st.sampled_from(["publish", "kill", "kill", "notes"])
        build_ = rule(plan=plans, overwrite=flags, end=ends, change=changes)(is_closed(_History.build))
        second_writer_ = rule(plan=plans, resume=flags)(is_open(_History.second_writer))
        finish_ = rule(count=st.integers(1, len(NAMES)))(is_open(_History.finish))
        close_ = rule()(is_open(_History.close))
        kill_ = rule()(is_open(_History.kill))
        publish_ = rule()(is_open(_History.publish))
        killed_ = rule(after=flags, change=changes)(is_open(_History.killed_while_it_publishes))
        discard_ = rule()(is_open(_History.discard))
        write_ = rule(often=st.integers(0, 9))(_History.another_program_writes_a_file)
        check_ = invariant()(_History.check)

        def teardown(self) -> None:
            self.end()

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=histories, stateful_step_count=20, deadline=None, suppress_health_check=checks, database=None
        ),
    )


class _History:
    """What was done to an output, and what must be there.

    published  the plan of the visible output; "" for none
    work       the plan of unfinished work, and the tensors that it may hold
    ended      the plan whose publication was killed, which the next run of it completes
    """

    def __init__(self, case: OutputCase) -> None:
        self.case = case
        self.staging: Staging | None = None
        self.plan = self.published = self.ended = ""
        self.overwrite = self.notes = False
        self.work: tuple[str, set[str]] = ("", set())

    # steps

    def open(self, plan: str, *, resume: bool = True, overwrite: bool = False, full: bool = False) -> None:
        before = self.visible()
        taken = bool(self.published) and not overwrite and self.ended != plan
        others = self.work[0] not in ("", plan) and (bool(self.work[1]) or bool(self.ended))
        refusal: StoreError | None = None
        try:
            staging = Staging.open(self.case.target(), self._spec(plan, resume, overwrite))
        except (OutputExists, CannotResume, NoSpace, BranchMoved) as error:
            refusal = error
        if refusal is not None:
            assert full or not isinstance(refusal, NoSpace)
            assert self.notes or not isinstance(refusal, BranchMoved)
            assert full or taken or self.notes or others or self.ended, f"nothing is in the way: {refusal}"
            assert not resume or self.visible() == before, "a run that was refused has changed something"
            if self.ended:
                self._find_out(keep=True)  # a later run of its plan may complete it
            return
        assert not taken, "an output was opened that must not be replaced"
        assert not self.notes, "another program's file would be replaced"
        self.staging, self.plan, self.overwrite = staging, plan, overwrite
        if not (resume and self.work[0] == plan):
            self.work = plan, set()
        assert staging.finished <= self.work[1] | ({*NAMES} if self.ended == plan else set())
        if self.ended and not resume:
            self._find_out()

    def open_on_a_full_disk(self, plan: str) -> None:
        with patch.object(disk, "available_bytes", lambda folder: 0):
            self.open(plan, full=True)

    def build(self, plan: str, *, overwrite: bool, end: str, change: int) -> None:
        """A whole run in one step, or histories that publish would be rare."""
        self.open(plan, overwrite=overwrite)
        if self.staging is None:
            return
        self.finish(len(NAMES))
        if end == "notes":
            self.put_notes()
        if end == "kill":
            self.killed_while_it_publishes(after=True, change=change)
        else:
            self.publish()

    def second_writer(self, plan: str, *, resume: bool) -> None:
        before = self.visible()
        try:
            Staging.open(self.case.target(), self._spec(plan, resume, True)).close()
        except (Busy, OutputExists):
            assert self.visible() == before
        else:
            raise AssertionError("two runs build one output")

    def finish(self, count: int) -> None:
        assert self.staging is not None
        names = [name for name in NAMES if name not in self.staging.finished][:count]
        write_tensors(self.staging, names, _PLANS[self.plan])
        self.work[1].update(names)

    def close(self) -> None:
        assert self.staging is not None
        self.staging.weights.settle()
        self.staging.close()
        self.staging = None

    def kill(self) -> None:
        """Only what ends with a process ends: its locks and files."""
        assert self.staging is not None
        if self.staging._weights is not None:
            self.staging._weights.settle()
        self.staging._close_files()
        self.staging._locks.close()
        self.staging.target.close()
        self.staging = None

    def publish(self) -> None:
        staging = self.staging
        assert staging is not None
        complete = {*NAMES} <= staging.finished
        before = self.visible()
        staging.add_file("config.json", _CONFIG)
        try:
            staging.publish({})
        except StoreError:
            assert not complete or self.notes, "a complete output was not published"
            assert self.visible() == before or self.notes
            self.close()
            return
        assert complete
        # A run that was killed after its commit has published everything. The next one then replaces nothing.
        is_committed = staging.target.publication == "commit" and self.published == self.ended == self.plan
        assert not self.notes or is_committed, "published over another program's file"
        self.published, self.ended, self.work, self.staging = self.plan, "", ("", set()), None

    def killed_while_it_publishes(self, *, after: bool, change: int) -> None:
        """Before it, after it, or before the n-th change of what is there."""
        staging = self.staging
        assert staging is not None
        plain, fails = staging.target.publish, self.case.fails

        def publish(*arguments: Any, **options: Any) -> None:
            with nullcontext() if fails is None else fails(change, _Killed()):
                if after:
                    plain(*arguments, **options)
            raise _Killed

        staging.add_file("config.json", _CONFIG)
        complete = {*NAMES} <= staging.finished
        with patch.object(staging.target, "publish", publish):
            try:
                staging.publish({})
            except (_Killed, StoreError):  # a kill inside a request is a request that failed
                self.ended = self.plan if complete else self.ended
        self.kill()
        if self.ended:
            self._find_out(keep=True)

    def discard(self) -> None:
        assert self.staging is not None
        self.staging.discard()
        self.staging.close()
        self.staging, self.work = None, ("", set())
        if self.ended:
            self._find_out()

    def another_program_writes_a_file(self, often: int) -> None:
        if not often:  # afterwards nothing can be published
            self.put_notes()

    def put_notes(self) -> None:
        if not self.notes:
            self.case.put(_NOTES, b"mine")
            self.notes = True

    def end(self) -> None:
        if self.staging is not None:
            self.kill()

    # what must be true

    def check(self) -> None:
        files = dict(self.case.files())
        if self.notes:
            assert files.pop(_NOTES, None) == b"mine", "another program's file is gone"
        if self.published and not (self.ended and MANIFEST_NAME not in files):
            self._check_whole(files, self.published)
        elif "config.json" in files or MANIFEST_NAME in files:
            assert any(self._is_whole(files, plan) for plan in _PLANS), "a loader finds part of a model"

    def _check_whole(self, files: Mapping[str, bytes], plan: str) -> None:
        assert self._is_whole(files, plan), f"the output of plan {plan} is not as it was published"

    def _is_whole(self, files: Mapping[str, bytes], plan: str) -> bool:
        layout = layout_of_tests()
        for shard in layout.shards:
            data = files.get(shard.name, b"")
            for spec in shard.tensors:
                place = layout.places[spec.name]
                if data[place.offset : place.offset + place.nbytes] != tensor_data(spec, _PLANS[plan]).tobytes():
                    return False
        return files.get("config.json") == _CONFIG

    def visible(self) -> dict[str, bytes]:
        """What a loader could take."""
        files = dict(self.case.files())
        whole = MANIFEST_NAME in files or self.case.target().publication != "requests"
        return files if whole else {name: data for name, data in files.items() if not name.endswith(".safetensors")}

    def _find_out(self, *, keep: bool = False) -> None:
        """Which output is visible after a publication was cut off: the old one, the new one, or none."""
        before = self.published
        try:
            visible = self.case.target().verify(threads=1, progress=None).plan
        except (NotFound, CheckpointError, Corrupt):
            assert not before or self.case.target().publication == "requests", "an output is lost"
            visible = ""
        assert visible in ("", before, self.ended)
        self.published = visible
        if not keep:
            self.ended = ""

    def _spec(self, plan: str, resume: bool, overwrite: bool) -> OutputSpec:
        return OutputSpec(layout_of_tests(), plan, resume=resume, overwrite=overwrite, message="a model")
