"""The quality tables (examples/quality): the page is what was measured, and no split of the second testbed knows another."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.script_help import load

pytestmark = pytest.mark.repository

QUALITY = Path(__file__).parents[1] / "examples" / "quality"
table = load(QUALITY / "table.py")
testbed = load(QUALITY / "testbed.py")

SENTENCE = "one two three four five six seven eight nine ten"


def test_the_page_is_made_of_page_md_and_what_was_measured() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page()
    assert table.AUTO_PAGE.read_text(encoding="utf-8") == table.auto_page()
    assert table.auto_page().count("| the mean was written |") == 4


@pytest.mark.parametrize("model", table.TESTBEDS)
def test_no_row_is_kept_of_a_recipe_that_is_gone_or_changed(model: str) -> None:
    kept = table.Measured(table._kept(model), again=False).rows
    assert sorted(key.split()[0] for key in kept) == sorted(table.known(model))


def test_spearman_is_that_of_scipy() -> None:
    from scipy.stats import spearmanr

    a, b = [3.0, 1.0, 2.0, 2.0, 9.0], [1.0, 1.0, 5.0, 4.0, 7.0]
    assert table.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)


def test_differences_are_paired_by_row() -> None:
    # Rows differ by far more than the models do, which are 1% apart in every row but one.
    reference = {d: [1.0, 3.0] for d in table.DOMAINS}
    row = {d: [1.01, 3.01] for d in table.DOMAINS} | {"en": [1.01, 3.03]}
    change, error = table.difference(row, reference)
    assert change == pytest.approx(100 * math.expm1(0.0125))
    assert error == pytest.approx(100 * 0.01 / 4)  # of `en` alone: its two differences have a standard error of 0.01


def test_a_text_of_perplexities_or_losses() -> None:
    row = {d: [1.0, 3.0] for d in table.DOMAINS} | {"py": 5.5}
    assert table.perplexities(row) == {d: pytest.approx(math.exp(2)) for d in table.DOMAINS} | {"py": 5.5}


def _pages(split: str, *paragraphs: str) -> dict[str, str]:
    name = next(f"page{i}" for i in range(100) if testbed._split_of(f"page{i}") == split)
    return {name: "\n\n".join(paragraphs)}


def test_a_paragraph_of_an_earlier_split_is_dropped_wherever_its_lines_break() -> None:
    earlier = testbed._contents(f"Before it, {SENTENCE}, and after it.")
    pages = _pages("eval", f"New.\n{SENTENCE.replace('five ', 'five' + chr(10))}", "one two three four five")
    assert testbed._split(pages, "eval", earlier) == "one two three four five"


def test_a_long_line_of_an_earlier_split_is_dropped_however_few_its_words() -> None:
    line = "encoding_table=codecs.charmap_build(decoding_table)"
    earlier = testbed._contents(f"Training text.\n{line}\nshort line")
    assert (
        testbed._split(_pages("eval", f"# {line}", f"New.\n  {line}", "short line"), "eval", earlier)
        == f"# {line}\n\nshort line"
    )


def test_a_page_is_in_one_split_in_every_language() -> None:
    pages = _pages("tune", "text")
    assert testbed._split(pages, "tune", set()) == "text"
    assert testbed._split(pages, "train", set()) == testbed._split(pages, "eval", set()) == ""


def test_a_page_in_roff_becomes_its_words() -> None:
    source = '.\\" comment\n.TH LS 1\n.SH "NAME OF IT"\nls \\- list\n.TP\n\\fB\\-a\\fP, \\fB\\-\\-all\\fP\n'
    source += ".BR epoll (7)\n.B a b\n"
    assert testbed._plain(source) == "NAME OF IT\nls - list\n\n-a, --all\nepoll(7)\na b"


def test_the_loss_knows_every_token_that_is_trained_on() -> None:
    torch = pytest.importorskip("torch")
    assert torch.equal(testbed._known([[5, 3], [3, 9]]), torch.tensor([3, 5, 9]))
    rows = next(testbed._batches([2, *range(10, 10 + 2 * (testbed.ROW_TOKENS - 1) + 7)], 2))
    assert rows.shape == (testbed.ROWS, testbed.ROW_TOKENS)
    assert rows[:, 0].tolist() == [2, 2]
    assert sorted(rows[:, 1:].flatten().tolist()) == list(range(10, 10 + 2 * (testbed.ROW_TOKENS - 1)))


def test_every_recipe_names_the_models_and_texts_that_both_testbeds_have() -> None:
    for file in (QUALITY / "recipes").glob("*.yml"):
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:model|base_model): (\S+)", text)) <= {f"./models/{name}" for name in table.PARENTS}, file
        assert all(path.startswith(f"{table.TEXTS_OF_RECIPES}/tune/") for path in re.findall(r"file: ([^,}]+)", text)), file
