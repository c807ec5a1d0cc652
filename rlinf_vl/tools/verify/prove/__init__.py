"""`rlinf-vl prove-family`: proves a family against transformers, with a tiny random member."""
