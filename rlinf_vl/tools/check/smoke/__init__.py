"""`doctor CONFIG --smoke`: each part of a run once, on this machine, with random weights."""
