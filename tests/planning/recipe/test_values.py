"""What a parameter is worth for one tensor: gradients over layers, filters on names."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._planning.recipe import Entry, Setting, numeric
from weightsmith._planning.recipe.records import gradient

finite = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("values", "t", "expected"),
    [
        ([0, 0.5, 0.3, 0.7, 1], 0.0, 0.0),
        ([0, 0.5, 0.3, 0.7, 1], 0.125, 0.25),
        ([0, 0.5, 0.3, 0.7, 1], 0.25, 0.5),
        ([0, 0.5, 0.3, 0.7, 1], 0.375, 0.4),
        ([0, 0.5, 0.3, 0.7, 1], 1.0, 1.0),
        ([1, 0.7, 0.1], 0.75, 0.4),
        ([0, 1], 10 / 31, 10 / 31),
        ([0.55], 0.0, 0.55),
        ([0.55], 0.7, 0.55),
        ([0.55], 1.0, 0.55),
    ],
)
def test_numbers_are_interpolated_between_equally_spaced_points(values: list[float], t: float, expected: float) -> None:
    assert gradient(values, t) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("values", "t", "expected"),
    [
        ([True, False], 0.0, True),
        ([True, False], 0.999, True),
        ([True, False], 1.0, False),
        (["a", "b", "c"], 0.49, "a"),
        (["a", "b", "c"], 0.5, "b"),
        (["a", "b", "c"], 1.0, "c"),
        ([0.5, True], 0.5, 0.5),
    ],
)
def test_a_list_with_truth_values_or_text_makes_steps(values: list[object], t: float, expected: object) -> None:
    assert gradient(values, t) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [["1e-4", "3e-4"], [1e-4, "3e-4"], ["0.0001", "0.0002", "3e-4"]])
def test_text_that_is_a_number_is_one(values: list[str | float]) -> None:
    """YAML 1.1 reads 1e-4 as text."""
    assert gradient(values, 0.5) == pytest.approx(2e-4)


@pytest.mark.parametrize(("t", "expected"), [(0.0, 0), (0.999, 0), (1.0, 1)])
def test_numbers_of_a_flag_or_a_choice_make_steps(t: float, expected: int) -> None:
    assert gradient([0, 1], t, stepped=True) == expected
    assert gradient(["0", "1"], t, stepped=True) == str(expected)
    assert setting(((0, 1), None)).at("x", t, stepped=True) == (expected, setting(((0, 1), None)).entries[0])


def test_an_empty_list_has_no_value() -> None:
    assert gradient([], 0.5) is None


def test_numbers_of_a_gradient_come_back_as_float_even_between_equal_ints() -> None:
    assert type(gradient([2, 2], 0.5)) is float


@pytest.mark.slow
@given(st.lists(finite, min_size=1, max_size=9), st.floats(0, 1))
def test_a_gradient_stays_within_its_values(values: list[float], t: float) -> None:
    value = gradient(values, t)
    assert isinstance(value, float)
    slack = 1e-9 * max(abs(v) for v in values)
    assert min(values) - slack <= value <= max(values) + slack


@pytest.mark.long
@given(st.lists(finite, min_size=1, max_size=9), st.integers(0, 40))
def test_a_gradient_passes_through_its_values(values: list[float], k: int) -> None:
    i = k % len(values)
    t = i / (len(values) - 1) if len(values) > 1 else 0.0
    assert gradient(values, t) == pytest.approx(values[i], abs=1e-9)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (0.5, 0.5),
        ("1e-5", 1e-5),
        ("-2", -2),
        ("+.5", 0.5),
        ("5.", 5.0),
        ("1E3", 1000.0),
        ("99999999999999999999", 1e20),
    ],
)
def test_numbers_and_texts_that_are_numbers(value: str | float, number: float) -> None:
    assert numeric(value) == number
    assert type(numeric(value)) is type(number)


@pytest.mark.parametrize(
    "value", [True, False, "", "nan", "inf", "1e999", float("nan"), float("inf"), "0x10", "1_000", "a", " 1", "1 ", "٣"]
)
def test_everything_else_is_no_number(value: str | float) -> None:
    assert numeric(value) is None


def setting(*entries: tuple[object, str | None]) -> Setting:
    return Setting(tuple(Entry(v, f, f"r.yml:{i}:1") for i, (v, f) in enumerate(entries)), "r.yml:1:1")  # type: ignore[arg-type]


def test_the_first_entry_whose_filter_is_part_of_the_name_counts() -> None:
    s = setting((0.1, "layers.1"), (0.2, "mlp"), (0.3, "MLP"), (0.4, "lm_head"))
    values = [
        (match := s.at(name, 0.0)) and match[0]
        for name in ("model.layers.1.mlp", "model.layers.17.attn", "model.layers.2.mlp", "lm_head", "model.norm")
    ]
    assert values == [0.1, 0.1, 0.2, 0.4, None]


@pytest.mark.parametrize("catch_all", [None, "*", ""])
def test_no_filter_a_star_and_an_empty_one_fit_every_name(catch_all: str | None) -> None:
    s = setting((0.1, "mlp"), (0.2, catch_all), (0.3, "norm"))
    assert s.at("model.norm.weight", 0.0) == (0.2, s.entries[1])


def test_the_entry_that_fits_is_used_even_when_its_list_is_empty() -> None:
    assert setting(((), "mlp"), (0.2, None)).at("mlp.up", 0.5) is None


def test_gradients_are_evaluated_at_the_depth_asked_each_time() -> None:
    s = setting(((0.0, 1.0), "mlp"), ((1.0, 0.0), None))
    asked = [("mlp", 0.25), ("attn", 0.25), ("mlp", 0.75), ("mlp", 0.25)]
    assert [s.at(name, t)[0] for name, t in asked] == [0.25, 0.75, 0.75, 0.25]  # type: ignore[index]


def test_the_same_question_gives_the_same_tuple_and_allocates_nothing() -> None:
    s = setting(((0.0, 1.0), None))
    assert s.at("a", 0.5) is s.at("b", 0.5)


def test_settings_are_equal_by_what_was_written_and_survive_pickling() -> None:
    s = setting(((0.0, 1.0), "mlp"))
    s.at("mlp", 0.5)
    assert s == setting(((0.0, 1.0), "mlp"))
    copy = pickle.loads(pickle.dumps(s))
    assert copy == s
    assert copy.at("mlp", 0.5)[0] == 0.5


def test_false_and_zero_are_values() -> None:
    s = setting((False, "a"), (0, None))
    assert s.at("a", 0.0) == (False, s.entries[0])
    assert s.at("b", 0.0) == (0, s.entries[1])
