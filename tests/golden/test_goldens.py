"""The bytes of a few dozen small outputs are those of the table; see `regold.py` for how it is changed on purpose.

A refactoring must not change one of them. A case without a record and a record without a case are errors.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden import digests, inputs
from tests.golden.cases import CASES, Golden
from weightsmith._methods import get

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and transformers say of tiny models is not our concern

TABLE = digests.load()
BY_NAME = {case.name: case for case in CASES}
VARIED = (
    "ties",
    "ties_model_inv_density",
    "dare_ties",
    "sce",
    "arcee_fusion",
    "tsv_m",
    "fused_ties",
    "several_tiles_ties",
    "several_tiles_sce",
    "several_tiles_nuslerp_columns",
    "several_tiles_dare",
    "f32_dare_ties",
    "lora_ties",
    "own_tensor_method",
    "infinite_resumed",
    "moe_noise",
    "moe_merged_base",
    "merge_experts_fused_match",
)
"""Cases that are run in other ways too."""
LITTLE = 176_000_000
"""Bytes of memory with which two threads have tiles of one or two grains, for up to five inputs; less is an error."""


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all inputs."""
    folder = tmp_path_factory.mktemp("golden") / "inputs"
    inputs.make(folder)
    return folder


def check(case: Golden, root: Path, **options: int) -> None:
    """Run a case; its record must be in the table."""
    for module in case.needs:
        pytest.importorskip(module)
    assert case.name in TABLE["cases"], f"{case.name} is not in digests.json: python -m tests.golden.regold --write"
    lines = digests.differences(TABLE["cases"][case.name], digests.record(case, root, **options))
    assert not lines, "the output has changed:\n" + "\n".join(lines)


def test_the_table_has_the_cases_and_no_others() -> None:
    assert len(BY_NAME) == len(CASES), "two cases of one name"
    assert sorted(TABLE["cases"]) == sorted(BY_NAME)
    assert sorted(TABLE["inputs"]) == sorted(inputs.INPUTS)
    for case in CASES:
        assert ("platform" in TABLE["cases"][case.name]) == (not case.portable), case.name


@pytest.mark.slow
def test_inputs_are_those_of_the_table(root: Path) -> None:
    """Else the cases fail for another reason than the code under test."""
    assert {name: digests.tree_digest(root / name) for name in inputs.INPUTS} == TABLE["inputs"]


VARIANTS = frozenset(
    "breadcrumbs_row breadcrumbs_ties_model f32_dare_ties f32_ties f64_to_bf16 many_models mixed_16_bit mixed_f64 "
    "norm_match_max nuslerp_columns out_dtype spectrum_calibrate spectrum_floor task_vectors_groups task_vectors_random "
    "task_vectors_row_rank ties_row_l1".split()
)
"""Cases whose kernels take a second and more to compile. The second ring has them."""


@pytest.mark.matrix(*(case.name for case in CASES if case.name not in VARIANTS))
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden(case: Golden, root: Path) -> None:
    check(case, root)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}, {"threads": 2, "max_memory_bytes": LITTLE}], ids=str)
@pytest.mark.parametrize("name", VARIED)
def test_threads_and_memory_do_not_matter(name: str, options: dict[str, int], root: Path) -> None:
    check(BY_NAME[name], root, **options)


@pytest.mark.parametrize("name", ["infinite", "moe_infinite"])
def test_interrupted_work_has_the_bytes_of_uninterrupted(name: str) -> None:
    assert TABLE["cases"][f"{name}_resumed"] == TABLE["cases"][name]


def test_a_summary_accepts_rounding_and_nothing_more() -> None:
    name = "tsv_m"
    old = {**TABLE["cases"][name], "platform": "another"}
    assert digests.differences(old, TABLE["cases"][name]) == []
    for k in (2, 3, 4, 7):
        for tensor in list(old["summary"])[:3]:
            changed = dict(old["summary"])
            changed[tensor] = [x * (1 + 1e-4) if i == k else x for i, x in enumerate(changed[tensor])]
            lines = digests.differences({**old, "summary": changed}, TABLE["cases"][name])
            assert len(lines) == 1, (tensor, k, lines)
            assert tensor in lines[0]


def test_every_method_and_every_layout_has_a_case() -> None:
    def used(recipe: object) -> set[str]:
        if isinstance(recipe, dict):
            names = {str(recipe[key]) for key in ("merge_method", "architecture") if key in recipe}
            return names.union(*(used(value) for value in recipe.values()))
        return set().union(*(used(value) for value in recipe)) if isinstance(recipe, list) else set()

    docs = Path(__file__).parents[2] / "docs"
    # What a text tells depends on torch and transformers; tests/methods and tests/activations compare it with references.
    methods = {page.stem for page in (docs / "methods").glob("*.md") if page.stem != "README"}
    methods -= {name for name in methods if get(name).requires({})}
    layouts = set(re.findall(r"^\| `(\w+)` \|", (docs / "moe-layouts.md").read_text(), re.M))
    assert len(methods) >= 35
    assert len(layouts) >= 11
    assert set().union(*(used(case.recipe) for case in CASES)) >= methods | layouts
