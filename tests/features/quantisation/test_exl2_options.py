"""The tables of settings, groups and sizes, against totals computed from ExLlamaV2's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.exl2.layout import bits_of, groups_of, params, params_from_json, why_illegal
from weightsmith._models.formats.exl2.model import ATTENTION, HEAD, MLP, BlockParams

LLAMA = {
    **{role: (4096, 4096) for role in "qkvo"},
    "gate": (11008, 4096),
    "up": (11008, 4096),
    "down": (4096, 11008),
}
"""Shapes [out, in] of a block of Llama 7B."""

ATTENTION_BPW = (
    *(2.1330, 2.2150, 2.4259, 2.6720, 3.1642, 3.1681, 4.0392, 4.0470, 4.0862, 4.1332, 4.1681, 4.1936, 4.4025, 4.4594),
    *(5.3829, 5.4594, 6.0392, 6.6332, 8.0392),
)
MLP_BPW = (
    *(2.2475, 2.3256, 2.5969, 2.9128, 3.2846, 3.3681, 3.6204, 4.1386, 4.1995, 4.2672, 4.3506, 5.2498, 5.3332, 6.0724),
    *(6.3033, 6.8692, 8.0358),
)


def total(option: BlockParams) -> int:
    return sum(bits_of(groups_of(p, LLAMA[role][1]), LLAMA[role][1], LLAMA[role][0]) for role, p in option.items())


def bits_per_weight(options: Sequence[BlockParams]) -> list[float]:
    weights = sum(LLAMA[role][0] * LLAMA[role][1] for role in options[0])
    return [round(total(option) / weights, 4) for option in options]


def test_sizes_of_all_options() -> None:
    assert bits_per_weight(ATTENTION) == list(ATTENTION_BPW)
    assert bits_per_weight(MLP) == list(MLP_BPW)
    assert [total(ATTENTION[0]), total(ATTENTION[18])] == [143_142_912, 539_498_496]
    assert [total(MLP[0]), total(MLP[16])] == [304_011_760, 1_086_979_104]
    heads = {bits: bits_of(groups_of(p, 4096), 4096, 32000) / (4096 * 32000) for bits, p in HEAD.items()}
    assert {bits: round(average, 2) for bits, average in heads.items()} == {
        2: 2.74,
        3: 3.28,
        4: 4.44,
        5: 5.19,
        6: 6.34,
        8: 8.03,
    }


def test_numbers_of_distinct_settings() -> None:
    attention = {role: len({option[role] for option in ATTENTION}) for role in "qkvo"}
    mlp = {role: len({option[role] for option in MLP}) for role in ("gate", "up", "down")}
    assert (attention, mlp) == ({"q": 14, "k": 14, "v": 15, "o": 14}, {"gate": 13, "up": 13, "down": 14})


@pytest.mark.parametrize(
    ("text", "k", "counts", "last"),
    [
        ("8@.05/g32+4@.1/g128+3@.85/g128", 4096, [7, 4, 27], 32),
        ("8@.05/g32+4@.1/g128+3@.85/g128", 11008, [18, 9, 73], 64),
        ("5@.1+4@.9/g128", 4096, [4, 28], 128),
        ("6@.05/g32+3@.2/g64+2@.75/g64", 32, [1, 0, 0], 32),
        ("3@.05+2@.95/g64", 96, [1, 1], 32),
    ],
)
def test_groups_from_settings(text: str, k: int, counts: list[int], last: int) -> None:
    setting = params(text)
    groups = groups_of(setting, k)
    assert [sum(group.bits == bits for group in groups) for bits in setting.bits] == counts
    assert groups[-1].rows == last


@pytest.mark.slow
@pytest.mark.parametrize("k", [*range(32, 1600, 32), 11008, 65504])
def test_all_settings_give_legal_groups(k: int) -> None:
    for option in (*ATTENTION, *MLP, {str(bits): setting for bits, setting in HEAD.items()}):
        for setting in option.values():
            assert why_illegal(groups_of(setting, k), k) == ""


def test_settings_survive_json() -> None:
    for setting in (*HEAD.values(), *(p for option in (*ATTENTION, *MLP) for p in option.values())):
        assert params_from_json(setting.to_json(), "") == setting
        assert params(str(setting)) == setting


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bits": [4, 5]}, "not from the most to the fewest"),
        ({"bits": [5, 5]}, "not from the most to the fewest"),
        ({"bits": [7, 4]}, "not a list of 2, 3, 4, 5, 6, 8"),
        ({"bits": []}, "not a list of"),
        ({"bits": [True, False]}, "not a list of"),
        ({"bits": "54"}, "not a list of"),
        ({"bits_prop": [0.1]}, "not a number for each"),
        ({"bits_prop": [0.1, 0.8]}, "not shares that add up to 1"),
        ({"bits_prop": [1.5, -0.5]}, "not shares that add up to 1"),
        ({"bits_prop": [float("nan"), 0.9]}, "not a number for each"),
        ({"group_size": {"5": 128, "4": 16}}, "not one of 32, 64, 128"),
        ({"group_size": {"5": 128}}, "not one of 32, 64, 128"),
        ({"group_size": [128, 128]}, "not one of 32, 64, 128"),
        ({"scale_bits": 8}, "scale_bits is 8, not 4"),
    ],
)
def test_a_setting_that_no_writer_uses_is_rejected(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(FormatError, match=why):
        params_from_json({**params("5@.1+4@.9/g128").to_json(), **changes}, "model.layers.0.self_attn")


def test_a_setting_must_be_an_object() -> None:
    with pytest.raises(FormatError, match="not an object"):
        params_from_json([4], "")
