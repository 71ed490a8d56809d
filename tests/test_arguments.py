"""No function takes a long list of arguments: what belongs together is a record."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightsmith

SOURCES = Path(weightsmith.__file__).parent
MOST = 8
ALLOWED = {
    "_base/report/blocks.py:heat_maps",
    # Keywords of commands and of plug-ins are read from the signature.
    "_app/cli/moe.py:moe",
    "_app/cli/plan.py:plan",
    "_app/cli/quantize.py:_copy",
    "_app/cli/quantize.py:quantize",
    "_app/cli/tune.py:tune",
    "_methods/breadcrumbs.py:breadcrumbs",
    "_methods/breadcrumbs_ties.py:breadcrumbs_ties",
    "_methods/regmean.py:regmean",
    "_methods/signature.py:merge_method",
    "_methods/task_vectors.py:task_vectors",
    # To become records.
    "_kernels/codes.py:dequantise",
    "_kernels/packed.py:dequantise_rows",
    "_kernels/trellis.py:dequantise_trellis",
    "_kernels/trellis_search.py:_advance",
    "_kernels/trellis_search.py:_search",
    "_kernels/trellis_search.py:encode_tiles",
}


def functions() -> Iterator[tuple[str, int]]:
    """Each function of the sources, and the number of its arguments besides self and cls."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in arguments)
                yield f"{path.relative_to(SOURCES).as_posix()}:{node.name}", count


@pytest.mark.slow
def test_no_function_has_more_than_eight_arguments() -> None:
    assert {name for name, count in functions() if count > MOST} == ALLOWED
