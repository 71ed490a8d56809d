"""Reports: what commands found out, as values, and four ways to show them.

blocks.py    `Report`, and its parts: facts, tables, heat maps, curves; how numbers and names are written; charts as JSON
charts.py    colours; heat maps and curves as SVG and as tables of a page; charts.css and charts.js are theirs
html.py      a report as a page, which needs no network, no other file and no server, and in a cell of a notebook; page.css,
             page.js
terminal.py  facts, tables and heat maps on the terminal, then the verdict
"""
