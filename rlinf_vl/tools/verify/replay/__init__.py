"""`rlinf-vl replay`: runs a recorded training step in three implementations, and names the first
quantity in which two of them differ."""
