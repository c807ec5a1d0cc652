"""What is generated of the documentation is up to date. `tests/checks/documentation.py` builds the site."""

import json
import re
import runpy
from pathlib import Path

from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.config.systems import SYSTEMS
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.tools.convert.tables import table

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_of_config_keys_is_up_to_date():
    generator = runpy.run_path(str(DOCS / "generate_config_reference.py"))
    same = (DOCS / "config.md").read_text(encoding="utf-8") == generator["render"]()
    assert same, (
        "docs/config.md is not what the schema says: run python docs/generate_config_reference.py"
    )


def test_the_page_of_other_systems_keys_is_up_to_date():
    generator = runpy.run_path(str(DOCS / "generate_coming_from.py"))
    same = (DOCS / "coming-from.md").read_text(encoding="utf-8") == generator["render"]()
    assert same, (
        "docs/coming-from.md is not what the tables say: run python docs/generate_coming_from.py"
    )
    metrics = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert not [
        name
        for system in SYSTEMS
        for name in table(system).metrics.values()
        if f"`{name}`" not in metrics
    ]


def test_the_tables_of_algorithms_are_those_of_their_files():
    generator = runpy.run_path(str(DOCS / "generate_algorithm_tables.py"))
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    assert page == generator["render"](page), "python docs/generate_algorithm_tables.py"
    for folder in ("losses", "estimators"):
        for name in built_ins(folder):
            assert len(re.findall(rf"^\| `{name}` \|.*\[\d{{4}}\.\d{{5}}\]", page, re.M)) == 1, name


def test_the_page_of_models_has_every_family_and_shows_what_was_measured():
    generator = runpy.run_path(str(DOCS / "generate_models_page.py"))
    assert (DOCS / "models.md").read_text(encoding="utf-8") == generator["render"](), (
        "python docs/generate_models_page.py"
    )
    cells, columns = (
        json.loads((DOCS / "models.json").read_text(encoding="utf-8")),
        generator["COLUMNS"].keys(),
    )
    assert cells.keys() == FAMILIES.keys()
    for family, figures in cells.items():
        empty = {column for name, column in generator["REASONS"] if name == family}
        assert figures.keys() == columns - empty, (
            f"{family}: each cell has a figure or a reason, not both"
        )
