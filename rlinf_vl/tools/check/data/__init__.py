"""`rlinf-vl check-data`: reads a whole data set as training would, and reports its
contents and losses."""
