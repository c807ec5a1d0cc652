"""The rules of tests/mutants.py, and the list of mutants that may survive."""

import ast
import json
import random
from pathlib import Path

import mutants
import pytest


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("a < b", [("compare", "a <= b")]),
        ("a is not None", [("compare", "a is None")]),
        ("a + b", [("operator", "a - b")]),
        ("'a' + b", []),
        ("loss * mask", [("lost mask", "loss")]),
        ("x // y", [("operator", "x * y")]),
        ("-x", [("sign", "x")]),
        ("not x", [("not", "x")]),
        ("a and b", [("and/or", "a or b")]),
        ("True", [("constant", "False")]),
        ("3", [("off by one", "4")]),
        ("0.5", [("constant", "1.0")]),
        ("x.detach()", [("detach", "x")]),
        ("x.sum(1)", [("reduction", "x.mean(1)")]),
        ("max(a, 1)", [("reduction", "min(a, 1)")]),
        ("torch.where(is_real, a, b)", [("lost mask", "a")]),
        ("f(a, b, 1)", [("swapped", "f(b, a, 1)")]),
        ("f(a + 1, b)", []),
    ],
)
def test_an_expression_is_changed_by_its_rule(code, changed):
    node = ast.parse(code, mode="eval").body
    assert list(mutants.changes(node)) == changed


@pytest.mark.parametrize(
    ("code", "changed"),
    [("f(a)", [("dropped call", "pass")]), ("a += b", [("dropped sum", "a = b")]), ("a = b", [])],
)
def test_a_statement_is_changed_by_its_rule(code, changed):
    assert list(mutants.changes(ast.parse(code).body[0])) == changed


def test_messages_annotations_and_time_outs_are_left_alone():
    code = """
def f(x: int = 1) -> "list[int]":
    '''A text of 3 words.'''
    if not x:
        raise ValueError(f"{x + 1} is wrong")
    logger.info("%d", x + 2)
    return g(x, timeout=5)
"""
    scope = ast.parse(code).body[0]
    rules = [rule for node in mutants.seen_nodes(scope) for rule, _ in mutants.changes(node)]
    assert rules == ["not"]


@pytest.mark.slow
def test_there_are_thousands_and_each_is_another_program():
    everything = mutants.all_mutants()
    assert len(everything) > 5000 and len({mutant.key for mutant in everything}) == len(everything)
    for mutant in random.Random(0).sample(everything, 20):
        source = Path(mutants.ROOT, mutant.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(mutant.source())) != ast.dump(ast.parse(source)), mutant.key


@pytest.mark.slow
def test_each_survivor_has_a_reason_and_still_exists():
    explained = json.loads(mutants.SURVIVORS.read_text(encoding="utf-8"))
    keys = {mutant.key for mutant in mutants.all_mutants()}
    assert all(len(reason) > 10 for reason in explained.values())
    assert not explained.keys() - keys, "these are no mutants any more: remove them"
