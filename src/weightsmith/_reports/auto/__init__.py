"""A merge that is chosen by measuring: `weightsmith auto`; and text that a model writes by itself: `weightsmith write`.

writer.py     tokens drawn from a model's own predictions
write.py      `write`: a model, named as in a recipe, writes a text file
texts.py      the two texts of each fine-tune: for statistics, and held back
choice.py     parabolas, paired errors, the choice and its guard: numbers alone
pool.py       candidates as recipes, and their scores
auto.py       `auto`: the stages
result.py     what was found, in sentences; page.py as a page
"""
