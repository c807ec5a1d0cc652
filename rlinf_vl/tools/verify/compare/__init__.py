"""The verb `compare-batch`: a recorded batch of another system goes through our algorithm, column
after column, and the first column that differs is named with the likely reasons.

`batch_file` reads the file, `columns` computes every column with the functions that the trainer
calls, `foreign` holds the formulas of other systems, `variants` the table of known differences,
`verdict` searches it, `main` is the verb.
"""
