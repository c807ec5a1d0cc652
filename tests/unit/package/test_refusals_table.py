"""Every refusal of config, data and checks stands in tests/golden/refusals.txt as a user reads it.

`python tests/refusals.py` writes the table anew, and the difference is read by eye. Other tests compare the kind and the subject of
a refusal, and not its prose.
"""

import ast
import re
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
    "config", "data", *CHECKS, "runtime/hub.py", "extras/video", "extras/verifiers/rows.py",
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


def test_names_and_messages_are_different_ones():
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.message for case in CASES}) == len(CASES)


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
