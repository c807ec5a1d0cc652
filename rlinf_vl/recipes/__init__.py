"""Recipes: published results with their exact settings, in examples/recipes; the verb `recipes`."""
