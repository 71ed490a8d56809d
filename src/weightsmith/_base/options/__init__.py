"""Options, each said once: a dataclass field with its help, default and limits, from which all else follows.

    records.py   the options, in seven records
    option.py    one option: flags, keyword, help text, and the check that command line and Python share
    configuration.py    what a user sets once, in a file or in the environment
    keywords.py  the records as TypedDicts for type checkers, written by scripts/docs.py
    docstrings.py   the options of a function in its docstring

A new option is one field. The command line's flags, the functions' keywords, the help and docs/cli.md have it then.
"""

from weightsmith._base.options.docstrings import lists_options as lists_options
from weightsmith._base.options.option import GROUPS as GROUPS
from weightsmith._base.options.option import Option as Option
from weightsmith._base.options.option import assignment as assignment
from weightsmith._base.options.option import find_option as find_option
from weightsmith._base.options.option import named as named
from weightsmith._base.options.option import option_error as option_error
from weightsmith._base.options.option import option_records as option_records
from weightsmith._base.options.option import options_of as options_of
from weightsmith._base.options.option import read_options as read_options
from weightsmith._base.options.records import APPROXIMATIONS as APPROXIMATIONS
from weightsmith._base.options.records import STREAM_CACHE_BYTES as STREAM_CACHE_BYTES
from weightsmith._base.options.records import AutoSettings as AutoSettings
from weightsmith._base.options.records import EvaluateSettings as EvaluateSettings
from weightsmith._base.options.records import ExtractSettings as ExtractSettings
from weightsmith._base.options.records import QuantizeSettings as QuantizeSettings
from weightsmith._base.options.records import RecipeOptions as RecipeOptions
from weightsmith._base.options.records import RunOptions as RunOptions
from weightsmith._base.options.records import StatisticsSettings as StatisticsSettings
from weightsmith._base.options.records import TransplantSettings as TransplantSettings
from weightsmith._base.options.records import TuneSettings as TuneSettings
from weightsmith._base.options.records import WriteSettings as WriteSettings
from weightsmith._base.options.records import output_dtype as output_dtype
