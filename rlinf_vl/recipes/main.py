"""The verb `recipes`: list them, or show one."""

import argparse
import json

from rlinf_vl.recipes.catalog import find_recipe, recipes
from rlinf_vl.recipes.render import list_text, recipe_json, recipe_text


def main(arguments: argparse.Namespace) -> int:
    """Print all recipes, or the named one."""
    if arguments.name is not None:
        folder, names = find_recipe(arguments.name)
        if arguments.json:
            print(json.dumps(recipe_json(folder, names, with_settings=True), indent=1))
        else:
            print(recipe_text(folder, names))
    elif arguments.json:
        entries = [
            entry
            for folder, recipe in recipes().items()
            for entry in recipe_json(folder, list(recipe.variants), with_settings=False)
        ]
        print(json.dumps(entries, indent=1))
    else:
        print(list_text())
    return 0
