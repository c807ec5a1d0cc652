"""Data sets, whose rows become `Problem`s; images stay encoded until a model needs pixels."""
