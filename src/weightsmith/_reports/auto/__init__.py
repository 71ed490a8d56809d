"""A merge that is chosen by measuring: `weightsmith auto`; and text that a model writes by itself: `weightsmith write`.

write.py      `write`: a model, named as in a recipe, writes a text file: tokens drawn from its own predictions; the two texts
              of each fine-tune: for statistics, and held back
checks.py     what is refused before anything is computed
cost.py       what `--plan` says: time, memory, disk
pool.py       candidates as recipes, their scores, and the choice by parabolas and paired errors
auto.py       `auto`: the stages
result.py     the result, in sentences and as a page
"""
