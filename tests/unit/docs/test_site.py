"""The documentation builds as a site without a warning, and what is generated of it is up to date."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings (a page outside the navigation, a link or anchor that leads nowhere) are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "mkdocs.yml", "--site-dir"]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page_and_picture(site: Path):
    assert {p.stem for p in site.glob("*.html")} >= {p.stem for p in DOCS.glob("*.md")}
    assert {p.name for p in (site / "images").iterdir()} == {p.name for p in (DOCS / "images").iterdir()}
    assert not list(site.rglob("*.py"))


def test_the_site_needs_no_network(site: Path):
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?([^\"\s>]+)", page.read_text())
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page.name


def test_links_out_of_the_documentation_name_the_file(site: Path):
    architecture = (site / "architecture.html").read_text()
    assert "<code>controller/loop.py</code>" in architecture and 'href="../' not in architecture


def test_the_page_of_config_keys_is_up_to_date():
    generator = runpy.run_path(str(DOCS / "generate_config_reference.py"))
    same = (DOCS / "config.md").read_text(encoding="utf-8") == generator["render"]()
    assert same, "docs/config.md is not what the schema says: run python docs/generate_config_reference.py"


def test_the_memory_page_is_what_the_code_says():
    generator = runpy.run_path(str(DOCS / "generate_memory_page.py"))
    same = generator["render_page"]() == (DOCS / "memory.md").read_text(encoding="utf-8")
    assert same, "docs/memory.md is not what preflight and doctor say: run python docs/generate_memory_page.py"
