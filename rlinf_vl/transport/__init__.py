"""What travels: groups from workers to ranks (`groups`), weights from ranks to engines (`strategies`)."""
