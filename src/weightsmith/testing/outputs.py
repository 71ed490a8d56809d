"""The tests that every target of outputs must pass.

class TestMyStore(OutputTests):
    @pytest.fixture
    def case(self, tmp_path):
        store = start_my_store()
        return OutputCase(lambda: MyTarget(store, "models/out"), lambda: store.files("models/out"), store.put)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np

from weightsmith._base.errors import Busy, CannotResume, Corrupt, OutputExists, StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import Layout, Naming, make_layout
from weightsmith._outputs.checksum import combine, grain_bytes, hash_grains
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
