"""What some runs use, on top of the core; each part is imported when a run asks for it."""
