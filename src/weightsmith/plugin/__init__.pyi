"""The public names for plug-ins: this is their one list."""

# tensors
# files that tensors are read from
# programs: progress, recipes as values, what they read
from weightsmith._base.errors import excerpt as excerpt
from weightsmith._base.errors import first_line as first_line
from weightsmith._base.files import DAMAGED as DAMAGED
from weightsmith._base.files import Opener as Opener
from weightsmith._base.files import StoredTensor as StoredTensor
from weightsmith._base.files import open_local as open_local
from weightsmith._base.files import show as show
from weightsmith._base.installation import install as install

# reports
from weightsmith._base.report.blocks import Block as Block
from weightsmith._base.report.blocks import Code as Code
from weightsmith._base.report.blocks import Column as Column
from weightsmith._base.report.blocks import Curves as Curves
from weightsmith._base.report.blocks import Facts as Facts
from weightsmith._base.report.blocks import HeatMap as HeatMap
from weightsmith._base.report.blocks import Mark as Mark
from weightsmith._base.report.blocks import Table as Table
from weightsmith._base.report.blocks import finite_or_mark as finite_or_mark
from weightsmith._base.report.blocks import many as many
from weightsmith._base.report.blocks import safe as safe
from weightsmith._base.report.blocks import written as written
from weightsmith._base.report.html import chart_files as chart_files
from weightsmith._base.strict_json import parse_json as parse_json
from weightsmith._base.tensors import DTYPES as DTYPES
from weightsmith._base.tensors import TensorSpec as TensorSpec
from weightsmith._base.text import count as count
from weightsmith._base.text import duration as duration
from weightsmith._base.text import size as size
from weightsmith._execution.progress import Meter as Meter
from weightsmith._execution.progress import Rates as Rates
from weightsmith._execution.progress import Reading as Reading
from weightsmith._execution.progress import how_far as how_far

# outputs
from weightsmith._files.copied import is_weights as is_weights
from weightsmith._files.hf_folder import choose_weights as choose_weights
from weightsmith._methods import find_method as find_method

# merge methods
from weightsmith._methods.jobs.combination import GramJob as GramJob
from weightsmith._methods.method import FAMILIES as FAMILIES
from weightsmith._methods.method import Method as Method
from weightsmith._methods.method import Parameter as Parameter
from weightsmith._methods.method import describe_method as describe_method
from weightsmith._methods.method import merge_method as merge_method
from weightsmith._methods.user import names_file as names_file
from weightsmith._models.formats.config import method_of as method_of
from weightsmith._models.formats.config import plain_dtype as plain_dtype
from weightsmith._models.formats.decoded import F32 as F32
from weightsmith._models.formats.decoded import QuantisedModel as QuantisedModel
from weightsmith._models.formats.decoded import Weight as Weight
from weightsmith._models.formats.decoded import bands as bands
from weightsmith._models.formats.decoded import read_all as read_all
from weightsmith._models.formats.decoded import reader as reader

# architectures of GGUF files
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture as GgufArchitecture
from weightsmith._models.formats.gguf.base.architecture import GgufFamily as GgufFamily
from weightsmith._models.formats.gguf.base.architecture import GgufKey as GgufKey
from weightsmith._models.formats.gguf.base.values import GgufConfig as GgufConfig
from weightsmith._models.formats.gguf.base.values import GgufKeys as GgufKeys
from weightsmith._models.formats.gguf.base.values import GgufValues as GgufValues
from weightsmith._models.formats.matrices import MatrixEncoding as MatrixEncoding
from weightsmith._models.sources.files import PlainFiles as PlainFiles
from weightsmith._models.sources.files import SourceFile as SourceFile
from weightsmith._models.sources.files import unite as unite
from weightsmith._models.tokenizers.files import CHAT_TEMPLATES as CHAT_TEMPLATES
from weightsmith._outputs.local import check_out as check_out
from weightsmith._outputs.manifest import MANIFEST_NAME as MANIFEST_NAME
from weightsmith._outputs.manifest import compare as compare
from weightsmith._outputs.manifest import decode_manifest as decode_manifest
from weightsmith._outputs.manifest import list_files as list_files
from weightsmith._planning.planner.inputs import is_pattern as is_pattern

# stored formats
from weightsmith._planning.planner.inputs import names_ema as names_ema
from weightsmith._planning.recipe import Input as Input
from weightsmith._planning.recipe import ModelRef as ModelRef
from weightsmith._planning.recipe import Parameters as Parameters
from weightsmith._planning.recipe import Recipe as Recipe
from weightsmith._planning.recipe import Scalar as Scalar
from weightsmith._planning.recipe import Setting as Setting
from weightsmith._planning.recipe import load_recipe as load_recipe
from weightsmith._planning.recipe import numeric as numeric
from weightsmith._planning.recipe.tuning import in_yaml as in_yaml
from weightsmith._planning.recipe.tuning import value_end as value_end
from weightsmith._planning.recipe.values import parse_reference as parse_reference
from weightsmith._reports.tuning.texts import Fit as Fit
from weightsmith._reports.tuning.texts import RecipeTexts as RecipeTexts
