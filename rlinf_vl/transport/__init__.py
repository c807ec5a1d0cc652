"""Move groups through the object store (`groups`); let process groups meet (`rendezvous`)."""
