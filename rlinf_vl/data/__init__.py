"""Data sets: their rows become `Problem`s, with images as encoded bytes until a model needs
pixels."""
