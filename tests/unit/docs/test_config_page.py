"""What is generated of the documentation is up to date. `tests/checks/documentation.py` builds the site."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_of_config_keys_is_up_to_date():
    generator = runpy.run_path(str(DOCS / "generate_config_reference.py"))
    same = (DOCS / "config.md").read_text(encoding="utf-8") == generator["render"]()
    assert same, "docs/config.md is not what the schema says: run python docs/generate_config_reference.py"
