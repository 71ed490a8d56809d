"""Recipes as the user wrote them: the YAML grammar, gradients and filters, with positions. Nothing is resolved yet.

    written.py ─ yaml.py ─▶ Node tree ─ load.py ─▶ Recipe + every problem

    written.py   recipes as the user wrote them, in a file or in Python; values set by key path
    kinds.py     the form of the grammar: Kind, Key, Level; kinds of single values: how each is read, its words
    values.py    the kinds of larger values: models, texts, tokenizers, parameters of methods
    grammar.py   the keys of each mapping, of merges and of mixtures; their JSON Schema
    load.py      reads a tree by the grammar, knows what to say of keys that no mapping has; the recipes whose results it reads
    records.py   what a recipe becomes; gradients
    tuning.py    values to tune, in place of others

A wrong value does not stop reading: all problems are reported at once, each with file, line and column.
"""

from weightsmith._planning.recipe.grammar import GATE_MODES as GATE_MODES
from weightsmith._planning.recipe.load import HARMLESS as HARMLESS
from weightsmith._planning.recipe.load import OPTIONS as OPTIONS
from weightsmith._planning.recipe.load import Command as Command
from weightsmith._planning.recipe.load import Loaded as Loaded
from weightsmith._planning.recipe.load import load as load
from weightsmith._planning.recipe.load import load_recipe as load_recipe
from weightsmith._planning.recipe.records import SCHEDULED as SCHEDULED
from weightsmith._planning.recipe.records import Entry as Entry
from weightsmith._planning.recipe.records import Expert as Expert
from weightsmith._planning.recipe.records import Input as Input
from weightsmith._planning.recipe.records import ModelRef as ModelRef
from weightsmith._planning.recipe.records import Module as Module
from weightsmith._planning.recipe.records import Parameters as Parameters
from weightsmith._planning.recipe.records import Recipe as Recipe
from weightsmith._planning.recipe.records import Schedule as Schedule
from weightsmith._planning.recipe.records import Setting as Setting
from weightsmith._planning.recipe.records import Slice as Slice
from weightsmith._planning.recipe.records import Surgery as Surgery
from weightsmith._planning.recipe.records import TextRef as TextRef
from weightsmith._planning.recipe.records import Tokenizer as Tokenizer
from weightsmith._planning.recipe.records import TokenRule as TokenRule
from weightsmith._planning.recipe.records import Upcycling as Upcycling
from weightsmith._planning.recipe.records import numeric as numeric
from weightsmith._planning.recipe.tuning import Tunable as Tunable
from weightsmith._planning.recipe.tuning import read_template as read_template
from weightsmith._planning.recipe.written import Source as Source
from weightsmith._planning.recipe.written import StandardInput as StandardInput
from weightsmith._planning.recipe.written import WrittenRecipe as WrittenRecipe
from weightsmith._planning.recipe.written import copy_of as copy_of
from weightsmith._planning.recipe.yaml import Scalar as Scalar
