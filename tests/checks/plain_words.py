"""Names and docstrings are plain: no variable, parameter or attribute is bound to a filler, and no
docstring begins with one. `EXCEPTIONS` lists the names that stay, each with its reason."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rlinf_vl", "ray_utils")
#: Participles, pronouns and fillers: as names they say nothing of the thing that they hold.
VAGUE = frozenset(
    """
    found said made own shown heard told way given taken kept left_over seen drawn asked begun known
    wanted meant gone come came went others other rest ones those these it so such thing things stuff
    what which who whom much many most least few more less again anew before after then there here
    now later late early sure good bad best better worst held given_up set_aside whole half part_of
    spare lacks lacking missing_ones behind beside ahead_of under_way on_the_way flying landed sent
    got had has done_with told_of
    """.split()
)
#: Words that a docstring does not begin with: a verb, or an article and a noun, comes first.
RIDDLES = frozenset("What Of Which As Those That Where Who Whose So".split())
#: (file, name): why the name stays.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("rlinf_vl/actor/group.py", "then"): "a callback of the protocol Learner",
    ("rlinf_vl/driver/api.py", "others"): "a parameter of the public Run.report",
    ("rlinf_vl/data/dataset.py", "bad"): "a field of FilterResult, which five rooms read",
    ("rlinf_vl/data/dataset.py", "kept"): "a field of FilterResult, which five rooms read",
    ("rlinf_vl/tools/report/runs_table.py", "best"): "a key of `rlinf-vl runs --json`",
    ("rlinf_vl/extras/toy/maze.py", "shown"): "a key of rollout.env_kwargs",
}


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that is bound, and its line: variables, attributes and parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def docstrings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each docstring, and the line on which it begins."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text, node.body[0].lineno


def problems_of(path: Path, unused: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each vague name and riddle of a file; count down the exceptions it uses."""
    relative = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, line in bound_names(tree):
        plain_name = name.strip("_")
        if plain_name not in VAGUE:
            continue
        if (relative, plain_name) in EXCEPTIONS:
            unused.pop((relative, plain_name), None)
        else:
            yield f"{relative}:{line}: '{name}' names no thing; name what it holds"
    for text, line in docstrings(tree):
        first_word = text.split()[0] if text.split() else ""
        if first_word in RIDDLES:
            yield f"{relative}:{line}: a docstring begins with '{first_word}'; begin with a verb or a noun"


def main() -> str | None:
    unused = Counter(dict.fromkeys(EXCEPTIONS, 1))
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    problems = [problem for path in files for problem in problems_of(path, unused)]
    problems += [f"{file}: '{name}' is an exception, but not used there" for file, name in unused]
    if not problems:
        print(f"names and docstrings of {len(files)} files are plain, {len(EXCEPTIONS)} exceptions")
    return "\n".join(problems) or None


if __name__ == "__main__":
    sys.exit(main())
