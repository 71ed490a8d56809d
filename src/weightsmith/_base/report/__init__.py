"""Reports: what commands found out, as values, and four ways to show them.

blocks.py    `Report`, and its parts: facts, tables, heat maps, curves; how numbers and names are written; charts as JSON
charts.py    colours; heat maps and curves as SVG and as tables of a page; charts.css and charts.js are theirs
html.py      a report as a page, which needs no network, no other file and no server, and in a cell of a notebook; page.css,
             page.js
terminal.py  facts, tables and heat maps on the terminal, then the verdict
"""

from weightsmith._base.report.blocks import Block as Block
from weightsmith._base.report.blocks import Code as Code
from weightsmith._base.report.blocks import Column as Column
from weightsmith._base.report.blocks import Curves as Curves
from weightsmith._base.report.blocks import Facts as Facts
from weightsmith._base.report.blocks import HeatMap as HeatMap
from weightsmith._base.report.blocks import Mark as Mark
from weightsmith._base.report.blocks import Pictures as Pictures
from weightsmith._base.report.blocks import Report as Report
from weightsmith._base.report.blocks import Reported as Reported
from weightsmith._base.report.blocks import Table as Table
from weightsmith._base.report.blocks import heat_maps as heat_maps
from weightsmith._base.report.blocks import report_by as report_by
