"""Will it fit? Memory per GPU over the phases of a step, from the config and a trace of the real code without a GPU."""

from rlinf_vl.preflight.ledger import Gpu, Hardware, Ledger, Model, largest_budget, ledger
from rlinf_vl.preflight.table import main, render

__all__ = ["Gpu", "Hardware", "Ledger", "Model", "largest_budget", "ledger", "main", "render"]
