"""A run without Ray, in one process (`cluster.backend: local`): the engine, one trainer and the loop
of `rlinf_vl.controller`, for notebooks, debuggers and tests.

Users' rewards, environments and losses are called on the main thread, where the prompt of `pdb`
works.
"""
