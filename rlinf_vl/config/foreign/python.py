"""Settings of a Python file or notebook that uses TRL: keywords of GRPOConfig, LoraConfig and their like. Nothing is run."""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlinf_vl.config.foreign.values import Unreadable, flat

#: Calls whose keywords are settings, and the names for those that TRL's command line calls otherwise.
_CALLS: dict[str, dict[str, str]] = {
    "GRPOConfig": {},
    "LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"},
    "BitsAndBytesConfig": {},
    "GRPOTrainer": {"model": "model_name_or_path"},
    "load_dataset": {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"},
}
#: Of calls with many keywords, those that are settings.
_ONLY = {
    "GRPOTrainer": {"model", "reward_funcs", "environment_factory", "rollout_func", "tools"},
    "load_dataset": {"path", "name", "split"},
}


def settings(text: str, of_command: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Name → value of the keywords, and what the first command in the file's docstring says of the run; or, where the file has
    arguments of its own, of those.

    Args:
        of_command: the settings of a command line in a text.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", text))  # without a notebook's magics
    commanded = of_command(ast.get_docstring(tree) or "")
    names = _Names(tree, commanded)
    said: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (called := _called(node)) not in _CALLS:
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if called == "load_dataset":
            keywords = dict(zip(("path", "name"), node.args, strict=False)) | keywords
        if called == "LoraConfig":
            said["use_peft"] = True
        for name, expression in keywords.items():
            if name in _ONLY.get(called, keywords):
                value = _functions(expression) if name == "reward_funcs" else names.value(expression)
                theirs = _CALLS[called].get(name, name)
                for key, one in flat({theirs: value}):
                    said.setdefault(key, one)
    return said if names.arguments else said | commanded


class _Names:
    """What names and arguments of a command line are, where a file says so."""

    def __init__(self, tree: ast.Module, commanded: Mapping[str, Any]) -> None:
        self.commanded = commanded
        self.assigned: dict[str, ast.expr] = {}
        self.arguments: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=False))
                else:
                    pairs = [(target, value)]
                for name, given in pairs:
                    if isinstance(name, ast.Name):
                        self.assigned.setdefault(name.id, given)
            elif isinstance(node, ast.Call) and _called(node) == "add_argument":
                default = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
                flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                for flag in flags:
                    self.arguments[flag.lstrip("-").replace("-", "_")] = default or ast.Constant(None)

    def value(self, expression: ast.expr, depth: int = 0) -> Any:
        """Of literals, names, and models loaded by a name; `Unreadable` for the rest."""
        if depth < 8:
            match expression:
                case ast.Name(id=name) if name in self.assigned:
                    return self.value(self.assigned[name], depth + 1)
                case ast.Attribute(value=ast.Name(), attr=name) if name in self.arguments:
                    return (
                        self.commanded[name] if name in self.commanded else self.value(self.arguments[name], depth + 1)
                    )
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name.endswith("args"):  # of TrlParser
                    return self.commanded.get(attribute)
                case ast.BoolOp(op=ast.Or(), values=[*_, last]):
                    return self.value(last, depth)
                case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_]):
                    return self.value(first, depth + 1)
                case ast.Dict(keys=keys, values=values):
                    pairs = zip(keys, values, strict=True)
                    return {str(self.value(key, depth)): self.value(one, depth) for key, one in pairs if key}
                case ast.List(elts=parts) | ast.Tuple(elts=parts):
                    return [self.value(part, depth) for part in parts]
        try:
            return ast.literal_eval(expression)
        except ValueError:
            return Unreadable(ast.unparse(expression))


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _functions(expression: ast.expr) -> Any:
    """Reward functions by name."""
    parts = expression.elts if isinstance(expression, ast.List | ast.Tuple) else [expression]
    if all(isinstance(part, ast.Name | ast.Attribute) for part in parts):
        return [ast.unparse(part) for part in parts]
    return Unreadable(ast.unparse(expression))
