"""The settings in a Python file or notebook that uses TRL, read without running it.

Settings are the keywords of GRPOConfig, LoraConfig and similar calls.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlinf_vl.tools.convert.values import Unreadable, flat

#: Calls whose keywords are settings, each with the keywords that have another name on TRL's command
#: line. The tables of `rlinf_vl.tools.convert.tables` use the names of the command line.
_CALLS: dict[str, dict[str, str]] = {
    "GRPOConfig": {},
    "LoraConfig": {
        "r": "lora_r",
        "target_modules": "lora_target_modules",
        "modules_to_save": "lora_modules_to_save",
    },
    "BitsAndBytesConfig": {},
    "GRPOTrainer": {"model": "model_name_or_path"},
    "load_dataset": {
        "path": "dataset_name",
        "name": "dataset_config",
        "split": "dataset_train_split",
    },
}
#: Trainers of TRL whose settings have other defaults and meanings.
_OTHER_TRAINERS = {
    f"{trainer}{kind}"
    for trainer in ("RLOO", "PPO", "DPO", "KTO", "OnlineDPO", "NashMD", "XPO", "GKD", "ORPO")
    for kind in ("Config", "Trainer")
}
#: What to do with another trainer.
OTHERS = (
    "RLOO's advantages are algorithm.adv_type=rloo here: begin with 'rlinf-vl new experiment' and "
    "set each key yourself"
)
#: The module of what a file defines itself.
OWN_MODULE = "__main__"
#: The keywords that are settings, for calls where not all are.
_SETTING_KEYWORDS = {
    "GRPOTrainer": {"model", "reward_funcs", "environment_factory", "rollout_func", "tools"},
    "load_dataset": {"path", "name", "split"},
}


def settings(text: str, read_command: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the settings in a Python source: name → value.

    They are the keywords of calls, and the options of the first command in the file's docstring. In
    a file that defines its own arguments the options only fill these arguments.

    Args:
        text: the source.
        read_command: returns the settings of the first command line in a text.

    Raises:
        SyntaxError: the text is no Python.
        ValueError: it uses another trainer of TRL.
    """
    # A line for IPython is no Python, and sets nothing of a run.
    tree = ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", text))  # without a notebook's magics
    command_settings = read_command(ast.get_docstring(tree) or "")
    callees = {_callee(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    other_trainers = sorted(callees & _OTHER_TRAINERS)
    if other_trainers and not callees & {"GRPOConfig", "GRPOTrainer"}:
        raise ValueError(f"it uses {other_trainers[0]}; only GRPOConfig is converted. {OTHERS}")
    origins = _origins(tree)
    names = _Names(tree, command_settings)
    file_settings: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (callee := _callee(node)) not in _CALLS:
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if callee == "load_dataset":
            keywords = dict(zip(("path", "name"), node.args, strict=False)) | keywords
        if callee == "LoraConfig":
            file_settings["use_peft"] = True
        for name, expression in keywords.items():
            if name in _SETTING_KEYWORDS.get(callee, keywords):
                value = (
                    _functions(expression, origins)
                    if name == "reward_funcs"
                    else names.value(expression)
                )
                command_name = _CALLS[callee].get(name, name)
                for key, flat_value in flat({command_name: value}):
                    # The first call counts: later ones are of another stage, such as an evaluation.
                    file_settings.setdefault(key, flat_value)
    return file_settings if names.arguments else file_settings | command_settings


class _Names:
    """The values of a file's variables and of its command-line arguments.

    Attributes:
        command_settings: the settings of the command in the file's docstring.
        assigned: the first expression that is assigned to each variable.
        arguments: the default of each argument that the file defines.
    """

    def __init__(self, tree: ast.Module, command_settings: Mapping[str, Any]) -> None:
        self.command_settings = command_settings
        self.assigned: dict[str, ast.expr] = {}
        self.arguments: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=False))
                else:
                    pairs = [(target, value)]
                for variable, assigned_value in pairs:
                    if isinstance(variable, ast.Name):
                        self.assigned.setdefault(variable.id, assigned_value)
            elif isinstance(node, ast.Call) and _callee(node) == "add_argument":
                default = next(
                    (keyword.value for keyword in node.keywords if keyword.arg == "default"), None
                )
                flags = [
                    arg.value
                    for arg in node.args
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                ]
                for flag in flags:
                    self.arguments[flag.lstrip("-").replace("-", "_")] = default or ast.Constant(
                        None
                    )

    def value(self, expression: ast.expr, depth: int = 0) -> Any:
        """Return the value of a literal, a name, or a model that is loaded by name.

        Return `Unreadable` for any other expression.
        """
        if depth < 8:  # bounds variables that are assigned from each other
            match expression:
                case ast.Name(id=name) if name in self.assigned:
                    return self.value(self.assigned[name], depth + 1)
                case ast.Attribute(value=ast.Name(), attr=name) if name in self.arguments:
                    return (
                        self.command_settings[name]
                        if name in self.command_settings
                        else self.value(self.arguments[name], depth + 1)
                    )
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name.endswith(
                    "args"
                ):  # TrlParser's result
                    return self.command_settings.get(attribute)
                case ast.BoolOp(op=ast.Or(), values=[*_, last]):
                    return self.value(last, depth)
                case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_]):
                    return self.value(first, depth + 1)
                case ast.Dict(keys=keys, values=values):
                    pairs = zip(keys, values, strict=True)
                    return {
                        str(self.value(key, depth)): self.value(item, depth)
                        for key, item in pairs
                        if key
                    }
                case ast.List(elts=parts) | ast.Tuple(elts=parts):
                    return [self.value(part, depth) for part in parts]
        try:
            return ast.literal_eval(expression)
        except ValueError:
            return Unreadable(ast.unparse(expression))


def _callee(node: ast.Call) -> str:
    """Return the name of a called function or class, without its module."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _origins(tree: ast.Module) -> dict[str, str]:
    """Return the module of each function that a file defines or imports by name."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            origins |= {alias.asname or alias.name: module for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            origins[node.name] = OWN_MODULE
    return origins


def _functions(expression: ast.expr, origins: Mapping[str, str]) -> Any:
    """Return the names of reward functions, with their modules; `Unreadable` if one is no name."""
    parts = expression.elts if isinstance(expression, ast.List | ast.Tuple) else [expression]
    if not all(isinstance(part, ast.Name | ast.Attribute) for part in parts):
        return Unreadable(ast.unparse(expression))
    names = [ast.unparse(part) for part in parts]
    return [f"{origins[name]}.{name}" if name in origins else name for name in names]
