"""Settings of a shell script that starts a run: `key=value` (Hydra, OmegaConf) and `--key value` (TRL).

Nothing is run. Variables are followed (`X=1`, `${X:-1}`, `: "${X:=1}"`, arrays, sums), then the environment's; $HOME is ~.
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlinf_vl.config.foreign.values import flat, typed

_Variables = dict[str, str | list[str]]
_ASSIGNED = re.compile(r"\s*(?:(?:export|local|readonly|declare)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)", re.DOTALL)
_DEFAULT = re.compile(r"\s*:\s+\"?\$\{(\w+):?=(.*)\}\"?\s*", re.DOTALL)
#: What starts a run; settings come behind it.
_PROGRAM = re.compile(r"(^|/)(python[\d.]*|bash|sh|torchrun|accelerate|trl|deepspeed|uv)$")
#: What a launcher's options say of a run.
_OF_LAUNCHERS = ("num_processes", "nproc_per_node")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Command(NamedTuple):
    """Settings of one command, the configs that it names (`config`, `config-name`, `config-path`), and scripts it calls."""

    said: dict[str, Any]
    files: dict[str, str]
    scripts: list[str]


def commands(text: str, known: Mapping[str, str]) -> Iterator[Command]:
    """Every command of a script that has settings, or calls another script; `known` are its variables from elsewhere."""
    variables: _Variables = dict(known)
    for line in _logical_lines(text):
        if default := _DEFAULT.fullmatch(line):
            variables[default[1]] = os.environ.get(default[1]) or " ".join(_words(default[2], variables))
        elif (assigned := _ASSIGNED.fullmatch(line)) and (value := _value(assigned[3], variables)) is not None:
            before = variables.get(assigned[1], "")
            if assigned[2]:
                value = [*before, *value] if isinstance(before, list) else before + "".join(value)
            variables[assigned[1]] = value
        else:
            command = _command(_words(line, variables))
            if command.said or command.scripts:
                yield command


def _logical_lines(text: str) -> Iterator[str]:
    """Commands as they stand: without comments, joined where a backslash, a quote or an array's bracket goes on."""
    text = re.sub(r"\\[ \t]+(#.*)?\n", "\\\n", text)  # a comment behind a backslash, which no shell takes as meant
    line, quote, depth, i = "", "", 0, 0
    while i < len(text):
        c = text[i]
        if c == "\\" and quote != "'":
            line += " " if text[i + 1 : i + 2] in ("\n", "") else text[i : i + 2]
            i += 2
            continue
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c == "#" and (not line or line[-1].isspace()):
            end = text.find("\n", i)
            i = len(text) if end < 0 else end
            continue
        elif c in "()":
            depth = max(0, depth + (1 if c == "(" else -1))
        if c == "\n" and not quote and not depth:
            yield line
            line = ""
        else:
            line += c
        i += 1
    if quote and "\n" in line:  # an apostrophe in prose: read what follows it line by line
        yield from line.split("\n")
    else:
        yield line


def _value(text: str, variables: _Variables) -> str | list[str] | None:
    """The value of an assignment; None if it stands before a command, and is its alone."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return _words(text[1:-1], variables)
    words = _words(text, variables)
    return None if len(words) > 1 and not re.match(r"[;&|]", words[1]) else (words[0] if words else "").rstrip(";")


def _words(text: str, variables: _Variables) -> list[str]:
    """A command's words, quotes removed and variables expanded; $@ is nothing."""
    text = re.sub(r"\"?\$(@|\*|\{@\})\"?", " ", text)
    text = re.sub(r"\$\(\((.*?)\)\)|\$\([^()]*\)", lambda match: f'"{_expanded(match[0], variables)}"', text)
    single = {word for word in re.findall(r"'([^']*)'", text) if "$" in word}
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word):
                value = variables.get(array[1], [])
                words += value if isinstance(value, list) else [value]
            elif any(word.endswith(literal) for literal in single) and '"' + word not in text:
                words.append(word)
            else:
                value = _expanded(word, variables)
                words += value.split() if value.startswith("-") and re.fullmatch(r"\$\{?\w+\}?", word) else [value]
    except ValueError:  # prose, or an unclosed quote
        return []
    return words


def _expanded(text: str, variables: _Variables) -> str:
    """Variables, defaults and sums by their values; what has none stays as it is."""

    def of(name: str) -> str | None:
        if name in ("HOME", "PWD"):
            return "~" if name == "HOME" else "."
        value = variables.get(name, os.environ.get(name))
        return " ".join(value) if isinstance(value, list) else value

    def braced(match: re.Match[str]) -> str:
        known = None if match[1].isdigit() else of(match[1])
        if match[2]:
            return known or match[3].strip("\"'")
        return match[0] if known is None else known

    def summed(match: re.Match[str]) -> str:
        inner = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: of(m[1]) or m[0], match[1])
        try:
            return str(_sum(ast.parse(inner.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    text = re.sub(r"\$\(pwd\)", ".", text)
    for _ in range(5):
        before = text
        text = re.sub(r"\$\{(\w+)(?:(:?[-=])((?:[^{}]|\{[^{}]*\})*))?\}", braced, text)
        text = re.sub(r"\$([A-Za-z_]\w*)", lambda m: of(m[1]) or m[0], text)
        text = re.sub(r"\$\(\((.*)\)\)", summed, text)
        if text == before:
            break
    text = re.sub(r"\$\([^()]*\)", "", text)  # what another program would say
    return re.sub(r"\$\{(\w+)\}", r"$\1", text)  # braces mean something else in a config


def _sum(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_sum(left), _sum(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_sum(operand)
    raise ValueError(ast.unparse(node))


def _command(words: list[str]) -> Command:
    said: dict[str, Any] = {}
    files: dict[str, str] = {}
    scripts: list[str] = []
    start = next((i for i, word in enumerate(words) if _PROGRAM.search(word)), None)
    if start is None:
        return Command(said, files, scripts)
    rest = iter(words[start + 1 :])
    word = next(rest, None)
    while word is not None:
        following = next(rest, None)
        if option := re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL):
            name, values = option[1].replace("_", "-"), [option[2]] if option[2] is not None else []
            while option[2] is None and following is not None and _is_value(following):
                values.append(following.rstrip(","))
                following = next(rest, None)
            if name in ("config", "config-name", "config-path"):
                files[name] = values[0] if values else ""
            else:
                parsed = [typed(value) for value in values]
                said[option[1].replace("-", "_")] = parsed[0] if len(parsed) == 1 else parsed or True
        elif pair := re.fullmatch(r"[+~]{0,2}([A-Za-z_][\w.@/-]*)=(.*)", word, re.DOTALL):
            if pair[1] == "config" and pair[2].endswith((".yaml", ".yml")):
                files["config"] = pair[2]
            else:
                said[pair[1]] = typed(pair[2])
        elif word.endswith(".py") or word == "-m":  # what stood before it are a launcher's
            said = {key: value for key, value in said.items() if key in _OF_LAUNCHERS}
        elif word.endswith(".sh"):
            scripts.append(word)
        elif re.match(r"[|&;<>]", word):
            break
        word = following
    return Command(dict(flat(said)), files, scripts)


def _is_value(word: str) -> bool:
    """Whether a word behind --key is its value, and not the program, an option, or key=value."""
    return (
        not re.match(r"--?[A-Za-z]", word)
        and not word.endswith((".py", ".sh"))
        and not re.match(r"[|&;<>]|[+~]*[\w.]+=", word)
    )
