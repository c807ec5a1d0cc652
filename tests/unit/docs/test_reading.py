"""A newcomer's path stays short, and its words are those of the code."""

import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: Pages that a newcomer reads from the first to the last; everything else is reference.
PATH = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "concepts", "architecture", "one-step", "extending")),
]  # fmt: skip
WORDS_OF_PATH, WORDS_OF_README, WORDS_OF_CHANGELOG = 5000, 900, 900


def words(page: Path) -> int:
    """Return the number of words, those of code and tables included; frames and dashes are none."""
    return sum(bool(re.search(r"\w", word)) for word in page.read_text(encoding="utf-8").split())


def test_the_path_of_a_newcomer_is_short():
    counts = {page.name: words(page) for page in PATH}
    assert counts["README.md"] <= WORDS_OF_README
    assert sum(counts.values()) <= WORDS_OF_PATH, counts


def test_the_changelog_is_a_page():
    assert words(ROOT / "CHANGELOG.md") <= WORDS_OF_CHANGELOG


@pytest.mark.slow
def test_the_words_of_concepts_are_names_in_the_code():
    """Every term that docs/concepts.md prints bold is part of a name in the package."""
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    terms = {term.lower() for term in re.findall(r"\*\*([^*]+)\*\*", page)}
    assert len(terms) > 20
    joined = " ".join(identifiers())
    missing = {
        term for term in terms if not any(spelling in joined for spelling in spellings(term))
    }
    assert not missing


def identifiers() -> set[str]:
    """Return the names of the package's code in lower case; comments and strings have none."""
    names = set()
    for path in (ROOT / "rlinf_vl").rglob("*.py"):
        with path.open("rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
        names |= {token.string.lower() for token in tokens if token.type == tokenize.NAME}
    return names


def spellings(term: str) -> set[str]:
    """Return how a name may contain a term: in one word, with underscores, in the singular."""
    stems = {term, term.removesuffix("s"), term.removesuffix("d")}
    return {stem.replace("-", glue).replace(" ", glue) for stem in stems for glue in ("", "_")}
