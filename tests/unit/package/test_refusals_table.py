"""Every refusal of config, data and checks stands in tests/golden/refusals.txt as a user reads it.

`python tests/refusals.py` writes the table anew, and the difference is read by eye. Other tests compare the kind and the subject of
a refusal, and not its prose.
"""

import ast
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import ROOT, TABLE, Renderer, read_table

CASES = read_table()
PARTS = 8
#: Cases that import torch, transformers or an agent's packages, for seconds.
SLOW = re.compile(
    r">>> doctor|\$ (check-|preflight|doctor)| --check .*losses.py|FILES/torn train"
    r"|model_path=(FILES/)?(llama|llava .*sglang)|vlm.vision_encoder_attr=model.visul"
)
CHECKS = [f"tools/check/{name}.py" for name in ("checkpoint", "inputs", "teacher", "trial")]
#: Packages and modules whose refusals the table has.
SOURCES = (
    "config", "data", *CHECKS, "tools/check/hub.py", "extras/video", "extras/verifiers/rows.py",
)  # fmt: skip
#: Texts of refusals that no case provokes → why.
NOT_PROVOKED = {
    "engine of": "a map of slots",
    "free: node": "a map of slots",
    "from rlinf_vl.models.nf4 import try_on; try_on(": "a program",
    "can't be imported (": "takes a package that lacks one itself: tests/unit/config/test_refusals.py",
    "which does not answer on": "takes two minutes",
    "; install one that does": "takes two minutes",
    ": not complete after": "takes a server: tests/unit/data/test_fetch.py",
    ": more than": "takes a server: tests/unit/data/test_fetch.py",
    ": the connection ended": "takes a server: tests/unit/data/test_fetch.py",
    "bytes early": "takes a server: tests/unit/data/test_fetch.py",
    "a truncated video: there is no frame at": "takes one bad frame: tests/unit/data/test_videos.py",
    "a video whose frame at": "takes one bad frame: tests/unit/data/test_videos.py",
    "torch engine": "a path of prove-family",
    "context parallel": "a path of prove-family",
    "rollout.rollout_backend: sglang can't run models of type": "takes a certificate: tests/unit/models",
    ", which is not supported:": "takes a model that transformers makes: tests/unit/docs/test_models_page.py",
    "%s: the hub can't be reached (%s); its copy in the cache is used (HF_HUB_OFFLINE=1)": "a warning",
    "exit status": "takes a process that a signal ends",
}


def differences(cases: list) -> list[str]:
    with Renderer() as renderer:
        rendered = [(case, renderer.render(case)) for case in cases]
    return [f"{old.name}: {new.message}" for old, new in rendered if old != new]


@pytest.mark.quick
@pytest.mark.parametrize("part", range(PARTS))
def test_each_message_is_that_of_the_table(part):
    different = differences(
        [case for case in CASES if not SLOW.search(case.provoked_by)][part::PARTS]
    )
    assert not different, f"python tests/refusals.py writes these into {TABLE}"


@pytest.mark.slow
def test_each_message_that_takes_torch_is_that_of_the_table():
    assert not differences([case for case in CASES if SLOW.search(case.provoked_by)])


def test_each_case_stands_there_once():
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.provoked_by for case in CASES}) == len(CASES)


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each piece of prose in what a function raises, yields or returns, or binds on the way there."""
    ignored = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.Assert) or (
            isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "re."))
        ):
            # A docstring, a log's line, an invariant: none is a refusal. What is yielded is an expression, too.
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield)):
                ignored |= set(ast.walk(node))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and node not in ignored
                ):
                    text = node.value
                    if len(re.findall(r"\b[a-z]{2,}", text)) > 1 and " " in text.strip():
                        yield node.lineno, text.strip()


@pytest.mark.parametrize("source", SOURCES)
def test_each_text_of_a_refusal_is_provoked(source):
    table = TABLE.read_text(encoding="utf-8")
    path = ROOT / "rlinf_vl" / source
    missing = []
    for file in [path] if path.is_file() else sorted(Path(path).rglob("*.py")):
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8"))):
            if text not in table and text not in NOT_PROVOKED:
                missing.append(f"{file.relative_to(ROOT)}:{line}: {text}")
    assert not missing, "no case of tests/golden/refusals.txt provokes these"


#: Parts of statements that refuse and that no case reaches → why.
NOT_REACHED = {
    "Key(hints[field.name]": "no refusal; the schema is walked once in a process",
    "they lead back to this file": "its depth ends a trace",
    "unreadable('image')": "takes a file that this user may not read",
    "video file can't be read": "takes a file that this user may not read",
    "{checkpoint_text}: {reason}": "takes a certificate: tests/unit/models",
    "rollout.agent: ": "takes a package that lacks one itself: tests/unit/config/test_refusals.py",
    "logger_backends: {reason}": "takes a package that lacks one itself: tests/unit/config/test_refusals.py",
}


def places(file: Path) -> dict[tuple[str, int], str]:
    """Return the statements of a file that raise, and those that yield, as rules do."""
    kinds = ast.Raise if file.parent.name in ("data", "video") else ast.Raise | ast.Yield
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
    # A bare `raise` passes on what another place refuses.
    return {(str(file), n.lineno): ast.unparse(n) for n in nodes if ast.unparse(n) != "raise"}


@pytest.mark.slow
def test_each_place_that_refuses_is_reached():
    files: list[Path] = []
    for folder in ("config", "data", "extras/video"):
        files += sorted((ROOT / "rlinf_vl" / folder).rglob("*.py"))
    refusals = {place: text for file in files for place, text in places(file).items()}
    names, reached, tracer = {str(file) for file in files}, set(), sys.gettrace()

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in names:
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    # An image is fetched in a thread.
    threading.settrace(trace)
    try:
        with Renderer() as renderer:
            for case in CASES:
                if not SLOW.search(case.provoked_by):
                    sys.settrace(trace)  # a circle of files has ended it
                    renderer.render(case)
    finally:
        sys.settrace(tracer)
        threading.settrace(tracer)
    excused = (*NOT_PROVOKED, *NOT_REACHED)
    missing = [
        (*place, text)
        for place, text in refusals.items()
        if place not in reached and not any(part in text for part in excused)
    ]
    assert len(refusals) > 200 and not missing
