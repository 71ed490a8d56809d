"""Runs prepared plans: what is needed first, the plan itself, and the files beside the weights.

execute.py    a whole plan, or one part
stages.py     results of other recipes that must be written first
measured.py   plans that follow from the products of another one
run.py        one plan
files.py      the files besides the weights
unwritten.py  computations that write nothing
"""

from weightsmith._execution.execute import PRODUCTS_LABEL as PRODUCTS_LABEL
from weightsmith._execution.execute import PartDone as PartDone
from weightsmith._execution.execute import execute as execute
from weightsmith._execution.execute import execute_part as execute_part
from weightsmith._execution.execute import execute_products as execute_products
from weightsmith._execution.output import check_options as check_options
from weightsmith._execution.run import NO_CALLBACKS as NO_CALLBACKS
from weightsmith._execution.run import Callbacks as Callbacks
from weightsmith._execution.run import Helped as Helped
from weightsmith._execution.run import Merged as Merged
from weightsmith._execution.stages import check_computable as check_computable
from weightsmith._execution.unwritten import make_product as make_product
from weightsmith._execution.unwritten import measure_distance as measure_distance
