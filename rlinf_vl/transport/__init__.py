"""Move groups from workers to ranks (`groups`) and weights from ranks to engines (`strategies`)."""
