"""The candidate settings of a block's linear layers.

The tables are those of ExLlamaV2 0.3.2, so that measurements can be exchanged with it. `formats.exl2.layout.params`
reads the texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightsmith._models.formats.exl2.layout import Params, params

BlockParams = Mapping[str, Params]
"""A setting for each linear layer of a block, by the module's role: q, k, v, o, or gate, up, down."""

_LOW, _LOW_V = "3@.1+2@.9/g64", "4@.1+3@.9/g128"

_ATTENTION = (  # q and k; v; o
    ("3@.05+2@.95/g64", "3@.05+2@.95/g64", "3@.05+2@.95/g64"),
    (_LOW, "3@.25+2@.75/g64", _LOW),
    (_LOW, _LOW_V, _LOW),
    (_LOW, _LOW_V, "4@.1+3@.9/g128"),
    ("4@.1+3@.9/g128", "4@.1+3@.9/g128", "4@.1+3@.9/g128"),
    ("4@.1+3@.9/g128", "4@.1+3@.9/g64", "4@.1+3@.9/g128"),
    ("4/g128", "4/g128", "4/g128"),
    ("4/g128", "4/g64", "4/g128"),
    ("4/g64", "4/g32", "4/g64"),
    ("4/g32", "4/g32", "4/g32"),
    ("5@.1+4@.9/g128", "5@.1+4@.9/g64", "5@.1+4@.9/g128"),
    ("5@.1+4@.9/g64", "5@.1+4@.9/g32", "5@.1+4@.9/g64"),
    ("5@.1+4@.9/g64", "5/g64", "5@.1+4@.9/g64"),
    ("5@.1+4@.9/g32", "5/g32", "5@.1+4@.9/g32"),
    ("6@.1+5@.9/g128", "6/g128", "6@.1+5@.9/g128"),
    ("6@.1+5@.9/g32", "6/g32", "6@.1+5@.9/g32"),
    ("6/g128", "6/g128", "6/g128"),
    ("6/g32", "8/g32", "6/g32"),
    ("8/g128", "8/g128", "8/g128"),
)

_DOWN = "6@.05/g32+3@.2/g64+2@.75/g64"

_MLP = (  # gate, up, down
    ("3@.05+2@.95/g64", "3@.05+2@.95/g64", _DOWN),
    ("3@.1+2@.9/g64", "3@.25+2@.75/g64", _DOWN),
    ("3@.1+2@.9/g64", "3@.3+2@.7/g64", "5@.05+3@.95/g32"),
    ("3@.1+2@.9/g64", "3@.3+2@.7/g64", "5@.05+4@.95/g32"),
    ("4@.1+3@.9/g128", "4@.25+3@.75/g128", "8@.05/g32+4@.1/g128+3@.85/g128"),
    ("4@.1+3@.9/g32", "4@.25+3@.75/g32", "8@.05+4@.1+3@.85/g32"),
    ("4@.1+3@.9/g32", "4@.25+3@.75/g32", "8@.05/g32+4@.95/g128"),
    ("4/g128", "4/g32", "8@.05/g32+4@.95/g128"),
    ("4/g32", "4/g32", "8@.05+4@.95/g32"),
    ("5@.1+4@.9/g128", "5@.25+4@.75/g128", "8@.05/g32+5@.1/g128+4@.85/g128"),
    ("5@.1+4@.9/g32", "5@.25+4@.75/g32", "8@.05+5@.1+4@.85/g32"),
    ("6@.1+5@.9/g128", "6@.25+5@.75/g128", "8@.05/g32+6@.1/g128+5@.85/g128"),
    ("6@.1+5@.9/g32", "6@.25+5@.75/g32", "8@.05+6@.1+5@.85/g32"),
    ("6/g128", "6/g128", "8@.05/g32+6@.95/g128"),
    ("8@.1+6@.9/g128", "8@.1+6@.9/g128", "8@.15+6@.85/g128"),
    ("8@.1+6@.9/g128", "8@.1+6@.9/g128", "8/g128"),
    ("8/g128", "8/g128", "8/g128"),
)

_HEAD = {
    2: "4@.3+2@.7/g32",
    3: "4@.15+3@.85/g32",
    4: "6@.15+4@.85/g32",
    5: "6@.15+5@.85/g128",
    6: "8@.15+6@.85/g128",
    8: "8/g128",
}


def _options(roles: tuple[str, ...], table: tuple[tuple[str, ...], ...]) -> tuple[BlockParams, ...]:
    return tuple({role: params(text) for role, text in zip(roles, row, strict=True)} for row in table)


ATTENTION = _options(("q", "k", "v", "o"), tuple((q, q, v, o) for q, v, o in _ATTENTION))
"""The 19 candidates of an attention block, from the fewest bits to the most."""

MLP = _options(("gate", "up", "down"), _MLP)
"""The 17 candidates of an MLP. All experts of a block have the same."""

HEAD = {bits: params(text) for bits, text in _HEAD.items()}
"""The setting of a quantised head for each value of `head_bits`."""

PLAIN_HEAD = 16
"""The other value of `head_bits`: the head is float16. A tied head is then the embedding, and is not stored again."""
