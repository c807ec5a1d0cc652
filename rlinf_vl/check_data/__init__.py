"""`python -m rlinf_vl check-data`: reads a data set whole, as training would, and says what is in it and what would be lost."""
