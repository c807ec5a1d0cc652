"""Plants faults that are made by rule, hundreds of them, and reports which ones the tests find.

    python tests/mutants.py --cover             # once, half an hour: which line is run by which quick test
    python tests/mutants.py --cover tests/unit/rewards/test_judge.py   # of these tests alone, anew
    python tests/mutants.py                     # 600 mutants of the core, an hour or two on two cores
    python tests/mutants.py --number 40 --seed 3 --only packing
    python tests/mutants.py --survivors         # those of tests/golden/survivors.json again

A mutant is a copy of the package in which one expression or statement of the core is changed: a comparison,
a sign, an index, a reduction, a mask (`changes` has the rules). The tests that run its line are run until one
fails, the cheapest first. A mutant that none finds has survived: a test is missing, or the change changes
nothing that can be seen. tests/golden/survivors.json explains each that stays.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import edits
import planted_faults
import pytest

ROOT = planted_faults.ROOT
CORE = (
    *("algorithms", "packing", "actor", "rollout", "weights"),
    *("types", "engines/torch", "data", "rewards"),
)
#: What `--cover` writes: the tests, their seconds, and for each line the tests that run it.
COVERAGE = ROOT / ".cache/mutants/coverage.json"
SURVIVORS = ROOT / "tests/golden/survivors.json"
#: Whole runs, for lines that only processes of a test run.
WHOLE_RUNS = ("tests/e2e",)
#: Limits of the two rounds of a mutant's tests: files, tests, and seconds that they take without it.
ROUNDS = ((4, 40, 8.0), (16, 400, 60.0))
#: Seconds for the start of a round beyond its tests', and factor of their own.
PATIENCE_S, PATIENCE = 90, 6

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
REDUCTIONS = {
    "sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "amin": "amax",
    "any": "all", "all": "any", "cumsum": "cumprod", "argmax": "argmin", "maximum": "minimum", "minimum": "maximum",
}  # fmt: skip
#: Calls and keywords whose change shows in no result: messages, time-outs, sizes of buffers.
UNSEEN_CALLS = ("logger", "logging", "warnings", "time", "sleep", "join", "print")
UNSEEN_KEYWORDS = (
    "timeout",
    "timeout_s",
    "maxsize",
    "indent",
    "stacklevel",
    "daemon",
    "name",
    "flush",
)
UNSEEN_FUNCTIONS = ("__repr__", "__str__", "__del__")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one node.

    Attributes:
        file: the path below the repository.
        place: the function that it is in.
        first, last: the lines of the node.
        old, new: the node's code, and what replaces it.
        nth: its number among the nodes of the function that have this code.
    """

    file: str
    place: str
    rule: str
    first: int
    last: int
    old: str
    new: str
    nth: int

    @property
    def key(self) -> str:
        """What stays when lines move."""
        return f"{self.file}:{self.place}: {self.old} → {self.new} ({self.nth})"

    def source(self) -> str:
        """Return the file with the change."""
        path = ROOT / self.file
        source = path.read_text(encoding="utf-8")
        for name, scope in edits.scopes_of(source):
            if name == self.place:
                nodes = edits.equal_nodes(scope, self.old)
                return edits.replaced(source, nodes[self.nth], self.new)
        raise edits.DoesNotApply(self.key)


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the rule and the new code of each change of a node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield "compare", ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))
        case ast.BinOp(left=left, op=ast.Mult(), right=right) if "mask" in ast.unparse(right):
            yield "lost mask", ast.unparse(left)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS and not is_text(
            node
        ):
            yield "operator", ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", ast.unparse(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", ast.unparse(operand)
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", ast.unparse(ast.BoolOp(other, values))
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", str(value * 2 if value else 1.0)
        case ast.Call(func=ast.Attribute(value=value, attr="detach"), args=[]):
            yield "detach", ast.unparse(value)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=args, keywords=keywords) if (
            name in REDUCTIONS
        ):
            function = ast.Attribute(value, REDUCTIONS[name])
            yield "reduction", ast.unparse(ast.Call(function, args, keywords))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if REDUCTIONS.get(
            name
        ) in ("max", "min", "any", "all"):
            yield "reduction", ast.unparse(ast.Call(ast.Name(REDUCTIONS[name]), args, keywords))
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, chosen, _]):
            yield "lost mask", ast.unparse(chosen)
        case ast.Call(func=function, args=[first, second, *others], keywords=keywords) if (
            isinstance(first, ast.Name) and isinstance(second, ast.Name)
        ):
            yield "swapped", ast.unparse(ast.Call(function, [second, first, *others], keywords))
        case ast.Expr(value=ast.Call()):
            yield "dropped call", "pass"
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub(), value=value):
            yield "dropped sum", ast.unparse(ast.Assign([target], value, lineno=0))
        case _:
            pass


def is_text(node: ast.BinOp) -> bool:
    """Return whether a sum is one of texts, or a union of types."""
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and (part.value is None or isinstance(part.value, str)))
        for part in ast.walk(node)
    )


def seen_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function whose change could be seen in what it returns or does."""
    function = scope.name if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) else ""
    if not function or function in UNSEEN_FUNCTIONS:
        return
    body: list[ast.AST] = list(scope.body)  # pyright: ignore[reportAttributeAccessIssue]
    while body:
        node = body.pop()
        if isinstance(
            node,
            ast.Raise
            | ast.Assert
            | ast.JoinedStr
            | ast.FunctionDef
            | ast.AsyncFunctionDef
            | ast.ClassDef,
        ):
            continue
        call = node.value if isinstance(node, ast.Expr) else node
        if isinstance(call, ast.Constant) and call is not node:
            continue  # a docstring
        if isinstance(call, ast.Call):
            names = {part.id for part in ast.walk(call.func) if isinstance(part, ast.Name)} | {
                part.attr for part in ast.walk(call.func) if isinstance(part, ast.Attribute)
            }
            if names & set(UNSEEN_CALLS):
                continue
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.keyword) and child.arg in UNSEEN_KEYWORDS:
                    continue
                if isinstance(child, ast.AST):
                    body.append(child)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a file."""
    name = str(path.relative_to(ROOT))
    for place, scope in edits.scopes_of(path.read_text(encoding="utf-8")):
        seen = list(seen_nodes(scope))
        if not seen:
            continue
        # As `edits.equal_nodes` finds them: the nodes that are the same code, in the order of a walk.
        equal: defaultdict[str, list[ast.AST]] = defaultdict(list)
        for node in ast.walk(scope):
            if isinstance(node, ast.expr | ast.stmt):
                equal[ast.dump(node)].append(node)
        for node in seen:
            for rule, new in changes(node):
                old, dump = ast.unparse(node), ast.dump(node)
                if ast.dump(edits.parsed(old)) == dump:
                    nth = next(i for i, other in enumerate(equal[dump]) if other is node)
                    lines = node.lineno, node.end_lineno  # pyright: ignore[reportAttributeAccessIssue]
                    yield Mutant(name, place, rule, *lines, old, new, nth)


@cache
def all_mutants() -> list[Mutant]:
    """Return all mutants of the core, in a fixed order."""
    folders = [ROOT / planted_faults.PACKAGE / room for room in CORE]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    mutants = {mutant.key: mutant for path in paths for mutant in mutants_of(path)}
    return [mutants[key] for key in sorted(mutants)]


# --- which test runs which line ----------------------------------------------------------------------------------------


class CoveragePlugin:
    """A plugin of pytest, in each process that runs tests: lines and seconds of each test."""

    def __init__(self) -> None:
        import coverage

        sources = [str(ROOT / planted_faults.PACKAGE / room) for room in CORE]
        self._coverage = coverage.Coverage(
            data_file=str(COVERAGE.parent / f"lines-{os.getpid()}"),
            source=sources,
            config_file=False,
        )
        self._seconds: Counter[str] = Counter()
        self._coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        start = time.monotonic()
        yield
        self._seconds[item.nodeid] += time.monotonic() - start  # pyright: ignore[reportArgumentType]
        self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        data = self._coverage.get_data()
        tests: dict[str, dict[str, list[int]]] = {}
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in filter(None, contexts):
                    name = str(Path(file).relative_to(ROOT))
                    tests.setdefault(context, {}).setdefault(name, []).append(line)
        target = COVERAGE.parent / f"tests-{os.getpid()}.json"
        target.write_text(json.dumps({"seconds": self._seconds, "lines": tests}))


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch, where this module is a plugin: not in the process that hands tests out."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(CoveragePlugin())


def cover(processes: int, files: Sequence[str] = ()) -> None:
    """Run the quick tests, and write what each of them covers.

    With `files` run these test files alone, and keep what is known of the others.
    """
    COVERAGE.parent.mkdir(parents=True, exist_ok=True)
    for pattern in ("lines-*", "tests-*"):
        for old in COVERAGE.parent.glob(pattern):
            old.unlink()
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    options = ["-q", "-p", "mutants", "-m", "not slow", "-n", str(processes), "--dist", "loadfile"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    seconds: dict[str, float] = {}
    lines: defaultdict[str, list[str]] = defaultdict(list)
    if files and COVERAGE.exists():
        known = json.loads(COVERAGE.read_text())
        others = {
            number: test
            for number, test in enumerate(known["tests"])
            if test.partition("::")[0] not in files
        }
        seconds |= {test: known["seconds"][number] for number, test in others.items()}
        for line, numbers in known["lines"].items():
            lines[line] += [others[number] for number in numbers if number in others]
    for part in sorted(COVERAGE.parent.glob("tests-*.json")):
        content = json.loads(part.read_text())
        seconds |= content["seconds"]
        for test, files in content["lines"].items():
            for file, numbers in files.items():
                for number in numbers:
                    lines[f"{file}:{number}"].append(test)
    tests = sorted(seconds)
    numbers = {test: number for number, test in enumerate(tests)}
    content = {
        "tests": tests,
        "seconds": [round(seconds[test], 3) for test in tests],
        "lines": {line: sorted(map(numbers.__getitem__, names)) for line, names in lines.items()},
    }
    COVERAGE.write_text(json.dumps(content))
    print(f"{len(tests)} tests run {len(lines)} lines of the core: {COVERAGE}")


class Tests:
    """Which tests to run for a mutant."""

    def __init__(self) -> None:
        content = json.loads(COVERAGE.read_text())
        self._tests: list[str] = content["tests"]
        self._seconds: list[float] = content["seconds"]
        self._lines: dict[str, list[int]] = content["lines"]

    def rounds(self, mutant: Mutant) -> Iterator[tuple[list[str], float]]:
        """Yield the tests of each round, the cheapest first, and their seconds."""
        numbers = {
            number
            for line in range(mutant.first, mutant.last + 1)
            for number in self._lines.get(f"{mutant.file}:{line}", ())
        }
        is_uncovered = not numbers
        if is_uncovered:  # no test, or one in another process: those that run the file, or name it
            stem = Path(mutant.file).stem
            numbers = {
                number
                for line, others in self._lines.items()
                if line.startswith(f"{mutant.file}:")
                for number in others
            } or {
                number
                for number, test in enumerate(self._tests)
                if stem in source_of(test.partition("::")[0])
            }
        room = Path(mutant.file).parts[1]
        files: defaultdict[str, list[int]] = defaultdict(list)
        for number in numbers:
            files[self._tests[number].partition("::")[0]].append(number)
        # The room's own tests first, then those files that have the quickest one.
        order = sorted(
            files,
            key=lambda file: (f"/{room}/" not in file, min(self._seconds[n] for n in files[file])),
        )
        done: set[int] = set()
        for n_files, n_tests, limit in ROUNDS:
            chosen: list[int] = []
            total = 0.0
            for file in order[:n_files]:
                for number in sorted(files[file], key=self._seconds.__getitem__):
                    if number in done or len(chosen) >= n_tests:
                        continue
                    if total + self._seconds[number] <= limit or not chosen:
                        chosen.append(number)
                        total += self._seconds[number]
            done.update(chosen)
            if chosen:
                yield [self._tests[number] for number in chosen], total
        if is_uncovered:
            yield list(WHOLE_RUNS), 120.0


@cache
def source_of(file: str) -> str:
    """Return the text of a test file; an empty one where it is gone."""
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.exists() else ""


# --- trying mutants ----------------------------------------------------------------------------------------------------


def attempt(mutant: Mutant, root: Path, tests: Tests) -> tuple[str, str]:
    """Run a mutant's tests with it in the copy at `root`; return "killed" or "survived", and by which test."""
    last = "no test runs its line"
    with planted_faults.planted(root / mutant.file, mutant.source()):
        for names, seconds in tests.rounds(mutant):
            limit = PATIENCE_S + PATIENCE * seconds
            status, output = planted_faults.run_tests(root, "not slow", names, limit)
            if status not in (0, 5):
                lines = [
                    line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))
                ]
                return "killed", (lines or [f"status {status}"])[0][:200]
            last = f"{len(names)} tests pass"
    return "survived", last


def results_in(out: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a file by the mutants' keys; none where there is no file."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {result["key"]: result for result in map(json.loads, lines)}


def try_some(mutants: Sequence[Mutant], root: Path, tests: Tests, out: Path) -> None:
    """Try mutants one by one in the copy at `root`, and write each result at once."""
    planted_faults.use_copy(root)
    for mutant in mutants:
        begun = time.monotonic()
        verdict, test = attempt(mutant, root, tests)
        result = {"key": mutant.key, "rule": mutant.rule, "line": mutant.first}
        result |= {"verdict": verdict, "by": test, "seconds": round(time.monotonic() - begun, 1)}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
        change = f"{mutant.file}:{mutant.first} {mutant.rule}: {mutant.old} → {mutant.new}"
        print(f"{verdict:9} {change}", flush=True)


def try_all(mutants: Sequence[Mutant], out: Path, processes: int) -> list[dict[str, Any]]:
    """Try the mutants in several copies at once; results are written as they come, and those there are kept."""
    tests, known = Tests(), results_in(out)
    untried = [mutant for mutant in mutants if mutant.key not in known]
    planted_faults.load_libraries()
    pids = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(processes):
            root = Path(folder, str(number))
            planted_faults.copy_repository(root)
            if pid := os.fork():
                pids.append(pid)
                continue
            try_some(untried[number::processes], root, tests, out)
            os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)
    known = results_in(out)
    return [known[mutant.key] for mutant in mutants if mutant.key in known]


def figures(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the shares killed: in all, by rule, by room."""
    lines = []
    for title, key in (
        ("rule", lambda result: result["rule"]),
        ("room", lambda result: "/".join(result["key"].split("/")[1:-1])),
    ):
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for result in results:
            counts[key(result)][result["verdict"]] += 1
        for name, count in sorted(counts.items()):
            share = count["killed"] / count.total()
            lines.append(
                f"{title:5} {name:22} {count['killed']:4} of {count.total():4}  {share:.0%}"
            )
    killed = sum(result["verdict"] == "killed" for result in results)
    lines.append(f"{killed} of {len(results)} killed: {killed / len(results):.1%}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument(
        "--cover",
        nargs="*",
        metavar="FILE",
        help="find out which test runs which line: of all, or of these test files",
    )
    parser.add_argument("--number", type=int, default=600, help="mutants to try")
    parser.add_argument("--seed", type=int, default=1, help="of the choice among all")
    parser.add_argument("--only", default="", help="mutants whose path has this text")
    parser.add_argument("--list", action="store_true", help="print them")
    parser.add_argument("--survivors", action="store_true", help="try those that are explained")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=COVERAGE.parent / "results.jsonl")
    arguments = parser.parse_args()
    if arguments.cover is not None:
        cover(arguments.processes, arguments.cover)
        return 0
    mutants = all_mutants()
    if arguments.survivors:
        explained = json.loads(SURVIVORS.read_text(encoding="utf-8"))
        chosen = [mutant for mutant in mutants if mutant.key in explained]
    else:
        named = [mutant for mutant in mutants if arguments.only in mutant.file]
        chosen = random.Random(arguments.seed).sample(named, min(arguments.number, len(named)))
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.file}:{mutant.first} {mutant.rule}: {mutant.old} → {mutant.new}")
        return 0
    if not COVERAGE.exists():
        parser.error(f"there is no {COVERAGE}: run with --cover first")
    results = try_all(chosen, arguments.out, arguments.processes)
    print(figures(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
