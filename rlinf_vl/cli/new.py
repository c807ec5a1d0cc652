"""`rlinf-vl new KIND NAME`: write a commented template of a user's own file, of one of `KINDS`."""

import argparse
import keyword
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlinf_vl.errors import ConfigError


class Kind(NamedTuple):
    """A kind of file: its template, and the next steps for the user."""

    template: str
    next_steps: str


#: Kind → its template and next steps. Literal braces are doubled, as `str.format` fills the steps
#: in.
KINDS = {
    "experiment": Kind(
        "experiment.yaml.jinja",
        "look at it:  rlinf-vl train {path} --check\nrun it:      rlinf-vl train {path}",
    ),
    "env": Kind(
        "env.py.jinja",
        "try it:  rlinf-vl check-env {path}:{name}\nuse it:  rlinf-vl train toy-grpo-cpu rollout.env_class={path}:{name}",
    ),
    "agent": Kind(
        "agent.py.jinja",
        "try it:  rlinf-vl check-env {path}:{name}\nuse it:  rlinf-vl train toy-grpo-cpu rollout.agent.function={path}:{name}",
    ),
    "reward": Kind(
        "reward.py.jinja",
        "try it:  rlinf-vl check-reward {path}:{name}\n"
        "use it:  rlinf-vl train toy-grpo-cpu 'reward.functions=[{{function: {path}:{name}}}]'",
    ),
    "loss": Kind(
        "loss.py.jinja",
        "try it:  rlinf-vl train toy-grpo-cpu algorithm.loss_type={path}:{name} --check\n"
        "use it:  rlinf-vl train toy-grpo-cpu algorithm.loss_type={path}:{name}",
    ),
    "estimator": Kind(
        "estimator.py.jinja",
        "try it:  rlinf-vl train toy-grpo-cpu algorithm.adv_type={path}:{name} --check\n"
        "use it:  rlinf-vl train toy-grpo-cpu algorithm.adv_type={path}:{name}",
    ),
}


def new(kind: str, path: str) -> str:
    """Write the file from its template; returns the next steps for the user.

    Raises:
        ConfigError: the name can't be that of a class or function, or the file exists.
    """
    template, next_steps = KINDS[kind]
    ending = template.removesuffix(".jinja").partition(".")[2]
    file = Path(path.removesuffix(f".{ending}") + f".{ending}").expanduser()
    name = file.stem
    if ending == "py":
        name = name.replace("-", "_")
        # The class or function is imported by the name of the file.
        file = file.with_name(f"{name}.py")
        if not name.isidentifier() or keyword.iskeyword(name):
            subject = repr(name) if path == name else f"{path!r}: {name!r}"
            raise ConfigError(
                f"{subject} is no name in Python; write letters, digits and _, a letter first"
            )
        if kind == "env":
            name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        # A name that a template misspells fails, instead of rendering as nothing.
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    text = templates.get_template(template).render(name=name, file=file.name)
    if not file.parent.is_dir():
        raise ConfigError(
            f"{path!r}: no folder {str(file.parent)!r}; make it, or give another path"
        )
    try:
        # "x" never overwrites a file, not even one that was written in this moment.
        with file.open("x", encoding="utf-8") as output:
            output.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"{str(file)!r} is there already; take another name, or remove it"
        ) from error
    return f"wrote {file}\n{next_steps.format(path=file, name=name)}"


def main(arguments: argparse.Namespace) -> None:
    """Run the verb `new`, and print the next steps."""
    print(new(arguments.kind, arguments.name))
