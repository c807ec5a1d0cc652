"""The documentation builds as a site without a warning, loads nothing from the network, and its memory page is up to date."""

import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")


def main() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        # A page outside the navigation, or a link or anchor that leads nowhere, is an error.
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "mkdocs.yml", "--site-dir"]
        done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return done.stderr
        problems = [
            f"the site has no page {p.stem}" for p in DOCS.glob("*.md") if not (site / f"{p.stem}.html").exists()
        ]
        pictures = {p.name for p in (site / "images").iterdir()} ^ {p.name for p in (DOCS / "images").iterdir()}
        problems += [f"the site and docs/images differ in {name}" for name in sorted(pictures)]
        problems += [f"the site has a program: {path.name}" for path in site.rglob("*.py")]
        pages = {page.name: page.read_text() for page in site.glob("*.html")}
    problems += [f"{name} loads {url}" for name, text in pages.items() for url in LOADED.findall(text)]
    architecture = pages["architecture.html"]  # links out of the documentation become the file's name
    if "<code>controller/loop.py</code>" not in architecture or 'href="../' in architecture:
        problems.append("architecture.html links out of the site")
    generator = runpy.run_path(str(DOCS / "generate_memory_page.py"))
    if generator["render_page"]() != (DOCS / "memory.md").read_text(encoding="utf-8"):
        problems.append("docs/memory.md is not what preflight and doctor say: run python docs/generate_memory_page.py")
    if not problems:
        print(f"a site of {len(pages)} pages without a warning; docs/memory.md is up to date")
    return "\n".join(problems) or None


if __name__ == "__main__":
    sys.exit(main())
