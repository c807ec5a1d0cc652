"""Parts of some runs, on top of the core; each is imported when a run asks for it."""
