"""A run from its config to the end: its parts on Ray (`supervise`) or in one process
(`local`), the verbs that start it, and the Python interface (`api`, `policy`)."""
