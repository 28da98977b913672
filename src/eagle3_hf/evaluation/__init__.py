"""Measuring methods of generation on datasets, and reporting what was found.

`metrics` has the definitions as plain functions, `modules` the same for `evaluate.load`; `prompts` reads datasets,
`methods` lists what can be compared, `harness` runs it into a results file (`results`), `summary` turns that file into
tables and `report` shows them.
"""
