"""`convert-config`: write another system's config as one of ours, or explain one of its keys."""

import argparse
import sys
import tempfile
from pathlib import Path

from rlinf_vl.config.load import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.convert.convert import convert_file
from rlinf_vl.tools.convert.explain import explain
from rlinf_vl.tools.convert.render import render, summary


def main(arguments: argparse.Namespace) -> int:
    """Write the config, and print what each key became. Raises ConfigError if the file can't be
    converted, or if no system has the key to explain."""
    if bool(arguments.file) == bool(arguments.explain):
        raise ConfigError("convert-config takes a file, or --explain KEY; give one of them")
    if arguments.explain:
        print(explain(arguments.explain, arguments.system))
        return 0
    conversion = convert_file(arguments.file, arguments.system)
    text = render(conversion, arguments.file.name)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    lines = [summary(conversion, str(arguments.file))]
    lines += [f"  to do before it runs: {problem}" for problem in to_do(text)]
    if arguments.output:
        lines.append(f"written to {arguments.output}")
    # Standard output is the config itself, unless that goes to a file.
    print("\n".join(lines), file=sys.stdout if arguments.output else sys.stderr)
    return 0


def to_do(text: str) -> list[str]:
    """Return the problems for which a config, given as text, is refused. Of a converted one these
    are things that this machine lacks: data, a model, packages."""
    # A file, as `load_config` takes paths: the converted config may not be written anywhere.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "converted.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(str(path))
        except ConfigError as error:
            return list(error.problems)
    return []
