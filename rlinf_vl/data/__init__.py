"""Rows of datasets become `Problem`s; images stay the encoded bytes they came as until a model needs pixels."""
