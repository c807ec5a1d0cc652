"""The settings in a shell script that starts a run, read without running it.

Settings are `key=value` (Hydra, OmegaConf) and `--key value` (TRL). Variables of the script are
expanded (`X=1`, `${X:-1}`, `: "${X:=1}"`, arrays, sums), then those of the environment; $HOME is ~.

Not bashlex: it parses 141 of 205 published training scripts (53 of the others hold a sum) and
expands nothing; here all 205 are read.
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlinf_vl.tools.convert.values import flat, typed

_Variables = dict[str, str | list[str]]
#: Stand for a `$` in double quotes, and for one that a shell leaves as it is.
_QUOTED, _LITERAL = "\ue000", "\ue001"
#: Stand for the blanks of a word while those of its variables are split.
_HIDDEN_BLANKS = str.maketrans({" ": "\ue002", "\t": "\ue003", "\n": "\ue004"})
_SHOWN_BLANKS = {ord(hidden): chr(blank) for blank, hidden in _HIDDEN_BLANKS.items()}
#: An assignment: its name, "+" for `+=`, and the text of its value.
_ASSIGNMENT = re.compile(
    r"\s*(?:(?:export|local|readonly|declare)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)", re.DOTALL
)
#: The idiom `: "${NAME:=value}"`, which gives a variable a default.
_DEFAULT = re.compile(r"\s*:\s+\"?\$\{(\w+):?=(.*)\}\"?\s*", re.DOTALL)
#: Programs that start a run; settings follow them.
_PROGRAM = re.compile(r"(^|/)(python[\d.]*|bash|sh|torchrun|accelerate|trl|deepspeed|uv)$")
#: Options of launchers that are settings of a run.
_LAUNCHER_SETTINGS = ("num_processes", "nproc_per_node")
#: Operators of sums, $(( … )); the shell divides integers, so / is a floor division.
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Command(NamedTuple):
    """The settings of one command.

    Attributes:
        settings: dotted name → value.
        files: the configs that it names, by `config`, `config-name` or `config-path`.
        scripts: the shell scripts that it calls.
        unread: words behind the program that are no setting, config or script.
        trainer: the trainer of TRL that it starts, if a word names it.
    """

    settings: dict[str, Any]
    files: dict[str, str]
    scripts: list[str]
    unread: list[str]
    trainer: str = ""


def commands(text: str, outer_variables: Mapping[str, str]) -> Iterator[Command]:
    """Yield every command of a script that has settings or calls another script.

    Args:
        text: the script.
        outer_variables: variables that are set outside of the script.
    """
    variables: _Variables = dict(outer_variables)
    for line in _logical_lines(text):
        if default := _DEFAULT.fullmatch(line):
            variables[default[1]] = os.environ.get(default[1]) or " ".join(
                _words(default[2], variables)
            )
        elif (assignment := _ASSIGNMENT.fullmatch(line)) and (
            value := _value(assignment[3], variables)
        ) is not None:
            old_value = variables.get(assignment[1], "")
            if assignment[2]:  # X+=…
                value = (
                    [*old_value, *value]
                    if isinstance(old_value, list)
                    else old_value + "".join(value)
                )
            variables[assignment[1]] = value
        else:
            words = _words(line, variables)
            if words[:1] == ["eval"]:
                words = _words(" ".join(words[1:]), variables)
            command = _command(words)
            if command.settings or command.scripts:
                yield command


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the commands of a script without comments.

    Lines are joined where a backslash, an open quote or an array's open bracket continues them.
    """
    # A comment after a backslash ends the command in a shell, but its author meant to continue it.
    text = re.sub(r"\\[ \t]+(#.*)?\n", "\\\n", text)
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
    """Return the value of an assignment; None if it is set for one command only, `X=1 command`."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return _words(text[1:-1], variables)
    words = _words(text, variables, splits=False)
    return (
        None
        if len(words) > 1 and not re.match(r"[;&|]", words[1])
        else (words[0] if words else "").rstrip(";")
    )


def _words(text: str, variables: _Variables, splits: bool = True) -> list[str]:
    """Return a command's words, quotes removed and variables expanded; $@ is empty.

    Args:
        splits: whether the value of a variable outside quotes is split at its blanks, as a shell
            does in a command, and not in an assignment.
    """
    text = re.sub(r"\"?\$(@|\*|\{@\})\"?", " ", text)
    text = re.sub(
        r"\$\(\((.*?)\)\)|\$\([^()]*\)", lambda match: f'"{_expanded(match[0], variables)}"', text
    )
    lexer = shlex.shlex(_marked(text), posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if array := re.fullmatch(rf"[${_QUOTED}]\{{(\w+)\[[@*]\]\}}", word):
                value = variables.get(array[1], [])
                words += value if isinstance(value, list) else [value]
            else:
                # The word's own blanks were quoted: they split nothing.
                value = _expanded(word.translate(_HIDDEN_BLANKS), variables)
                parts = value.split() if splits and "$" in word else [value]
                visible_parts = [part.translate(_SHOWN_BLANKS) for part in parts]
                expanded = [
                    _expanded(part.replace(_QUOTED, "$"), variables) for part in visible_parts
                ]
                words += [part.replace(_LITERAL, "$") for part in expanded]
    except ValueError:  # prose, or an unclosed quote
        return []
    return words


def _marked(text: str) -> str:
    """Return a text with other marks for each `$` in double quotes, and in single ones or escaped.

    shlex drops quotes, and a variable means something else in each of them.
    """
    marked, quote, is_escaped = "", "", False
    for c in text:
        if c == "$" and (quote or is_escaped):
            marked = marked.removesuffix("\\") if is_escaped else marked
            marked += _LITERAL if is_escaped or quote == "'" else _QUOTED
        else:
            marked += c
        if not is_escaped and c in "\"'" and quote in ("", c):
            quote = "" if quote else c
        is_escaped = c == "\\" and quote != "'" and not is_escaped
    return marked


def _expanded(text: str, variables: _Variables) -> str:
    """Return a text with variables, defaults and sums replaced; one without a value stays."""

    def value_of(name: str) -> str | None:
        if name in ("HOME", "PWD"):
            return "~" if name == "HOME" else "."
        value = variables.get(name, os.environ.get(name))
        return " ".join(value) if isinstance(value, list) else value

    def braced(match: re.Match[str]) -> str:
        value = None if match[1].isdigit() else value_of(match[1])
        if match[2]:
            return value or match[3].strip("\"'")
        return match[0] if value is None else value

    def summed(match: re.Match[str]) -> str:
        inner = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: value_of(m[1]) or m[0], match[1])
        try:
            return str(_sum(ast.parse(inner.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    text = re.sub(r"\$\(pwd\)", ".", text)
    for _ in range(5):  # a variable's value may hold other variables
        old_text = text
        text = re.sub(r"\$\{(\w+)(?:(:?[-=])((?:[^{}]|\{[^{}]*\})*))?\}", braced, text)
        text = re.sub(r"\$([A-Za-z_]\w*)", lambda m: value_of(m[1]) or m[0], text)
        text = re.sub(r"\$\(\((.*)\)\)", summed, text)
        if text == old_text:
            break
    text = re.sub(r"\$\([^()]*\)", "", text)  # the output of another program is unknown
    return re.sub(r"\$\{(\w+)\}", r"$\1", text)  # braces are an interpolation in a config


def _sum(node: ast.expr) -> int:
    """Return the value of integer arithmetic. Raises ValueError: it has anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_sum(left), _sum(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_sum(operand)
    raise ValueError(ast.unparse(node))


def _command(words: list[str]) -> Command:
    """Return the settings, config files and scripts in a command's words."""
    settings: dict[str, Any] = {}
    files: dict[str, str] = {}
    scripts: list[str] = []
    unread: list[str] = []
    trainer, has_program = "", False
    start = next((i for i, word in enumerate(words) if _PROGRAM.search(word)), None)
    if start is None:
        return Command(settings, files, scripts, unread)
    if re.search(r"(^|/)trl$", words[start]) and start + 1 < len(words):
        trainer, start = words[start + 1], start + 1
    remaining_words = iter(words[start + 1 :])
    word = next(remaining_words, None)
    while word is not None:
        following = next(remaining_words, None)
        # --key a b is a list, and --key alone is true.
        if option := re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL):
            name, values = option[1].replace("_", "-"), [option[2]] if option[2] is not None else []
            while option[2] is None and following is not None and _is_value(following):
                values.append(following.rstrip(","))
                following = next(remaining_words, None)
            if name in ("config", "config-name", "config-path"):
                files[name] = values[0] if values else ""
            else:
                parsed = [typed(value) for value in values]
                settings[option[1].replace("-", "_")] = (
                    parsed[0] if len(parsed) == 1 else parsed or True
                )
        elif pair := re.fullmatch(r"[+~]{0,2}([A-Za-z_][\w.@/-]*)=(.*)", word, re.DOTALL):
            if pair[1] == "config" and pair[2].endswith((".yaml", ".yml")):
                files["config"] = pair[2]
            else:
                settings[pair[1]] = typed(pair[2])
        elif word.endswith(".py") or word == "-m":
            # The options before the program are the launcher's; few of them describe the run.
            settings = {key: value for key, value in settings.items() if key in _LAUNCHER_SETTINGS}
            has_program = True
            if word == "-m":  # the module's name follows
                word, following = following or "", next(remaining_words, None)
            if name := re.search(r"(?:^|[/.])(rloo)\w*(?:\.py)?$", word):
                trainer = name[1]
        elif word.endswith(".sh"):
            scripts.append(word)
        elif re.match(r"[|&;<>]", word):
            break
        # An output's redirection, or a variable that is not set, which a shell leaves out.
        elif has_program and not re.match(r"\d*[<>]|\$|\\?$", word):
            unread.append(word)
        word = following
    return Command(dict(flat(settings)), files, scripts, unread, trainer)


def _is_value(word: str) -> bool:
    """Return whether a word after --key is its value, not the program, an option or key=value."""
    return (
        not re.match(r"--?[A-Za-z]", word)
        and not word.endswith((".py", ".sh"))
        and not re.match(r"[|&;<>]|[+~]*[\w.]+=", word)
    )
