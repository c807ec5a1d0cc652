"""What differs between model families stands in their files: nobody else names a family or counts patches per token."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlinf_vl
from rlinf_vl.models.families import FAMILIES

PACKAGE = Path(rlinf_vl.__file__).parent
#: Folders and files that name families: the embedded tasks choose their models.
NAMING = ("models/families/", "extras/toy/", "config/toys.py")
#: Folders and files that know how many patches make a token: those that read or make checkpoints of a kind.
MERGING = (
    "models/families/", "models/image_processor.py", "models/video_processor.py", "models/shapes.py",
    "models/image_tokens.py", "models/by_path.py", "models/path_checks.py", "extras/toy/",
)  # fmt: skip
FILES = [(path, path.relative_to(PACKAGE).as_posix()) for path in sorted(PACKAGE.rglob("*.py"))]


def strings(path: Path) -> set[str]:
    """Return the string constants of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


@pytest.mark.slow
def test_no_other_file_names_a_family():
    naming = {
        name: FAMILIES.keys() & strings(path)
        for path, name in FILES
        if not name.startswith(NAMING) and FAMILIES.keys() & strings(path)
    }
    assert not naming, f"ask the family instead of comparing its name: {naming}"


def test_no_other_file_counts_patches_per_token():
    counting = [
        name
        for path, name in FILES
        if not name.startswith(MERGING) and "merge_size" in path.read_text(encoding="utf-8")
    ]
    assert not counting, f"ask `ImageTokens` or `Family.token_side`: {counting}"


def test_a_family_is_the_file_of_its_name():
    files = {path.stem for path, name in FILES if name.startswith("models/families/")}
    assert {name: family.model_type for name, family in FAMILIES.items()} == {
        name: name for name in files - {"__init__"}
    }


def test_families_are_known_without_torch():
    """Preflight asks them before anything is started."""
    code = (
        "import sys, rlinf_vl.models.families as f; assert f.FAMILIES; "
        "assert not {'torch', 'transformers', 'PIL'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
