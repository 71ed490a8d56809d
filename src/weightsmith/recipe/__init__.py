"""Recipes as the user wrote them: the YAML grammar, gradients and filters, with positions. Nothing is resolved yet.

    text ─ yaml.py ─▶ Node tree ─ walk.py ─▶ Recipe + every problem

    kinds.py                                               the form of the grammar: Kind, Key, Level
    single.py nested.py references.py parameters.py        kinds of values: how each is read, its JSON Schema, its words
    grammar.py moe_grammar.py                              the keys of each mapping
    misuse.py                                              what to say of keys that no mapping has
    schema.py                                              the JSON Schema of it all

A wrong value does not stop reading: all problems are reported at once, each with file, line and column.
"""

from weightsmith.recipe.load import Command as Command
from weightsmith.recipe.load import Loaded as Loaded
from weightsmith.recipe.load import Source as Source
from weightsmith.recipe.load import StandardInput as StandardInput
from weightsmith.recipe.load import load as load
from weightsmith.recipe.load import parse as parse
from weightsmith.recipe.misuse import HARMLESS as HARMLESS
from weightsmith.recipe.misuse import RETIRED as RETIRED
from weightsmith.recipe.moe_grammar import GATE_MODES as GATE_MODES
from weightsmith.recipe.nodes import Scalar as Scalar
from weightsmith.recipe.records import Expert as Expert
from weightsmith.recipe.records import Input as Input
from weightsmith.recipe.records import ModelRef as ModelRef
from weightsmith.recipe.records import Module as Module
from weightsmith.recipe.records import Parameters as Parameters
from weightsmith.recipe.records import Recipe as Recipe
from weightsmith.recipe.records import Section as Section
from weightsmith.recipe.records import Slice as Slice
from weightsmith.recipe.records import Surgery as Surgery
from weightsmith.recipe.records import Tokenizer as Tokenizer
from weightsmith.recipe.records import TokenRule as TokenRule
from weightsmith.recipe.records import Upcycling as Upcycling
from weightsmith.recipe.schema import moe_schema as moe_schema
from weightsmith.recipe.schema import schema as schema
from weightsmith.recipe.values import SCHEDULED as SCHEDULED
from weightsmith.recipe.values import Entry as Entry
from weightsmith.recipe.values import Schedule as Schedule
from weightsmith.recipe.values import Setting as Setting
from weightsmith.recipe.values import gradient as gradient
from weightsmith.recipe.values import numeric as numeric
