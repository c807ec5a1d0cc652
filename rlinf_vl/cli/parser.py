"""The verbs of the command line and their arguments, help and completion."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import rlinf_vl
from rlinf_vl.cli.completion import complete_config, complete_override
from rlinf_vl.cli.keys import configs_and_keys
from rlinf_vl.cli.new import KINDS
from rlinf_vl.config.aliases import SYSTEMS
from rlinf_vl.config.keys import config_keys, config_sections
from rlinf_vl.config.load import examples
from rlinf_vl.config.overrides import ONE_RUN
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import nearest
from rlinf_vl.runtime.run_code import OPTION

COMMAND = "rlinf-vl"


class _MainParser(argparse.ArgumentParser):
    """Its error about a verb says which one is near, or that a config's name wants `train` before it."""

    verbs: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        mistyped = re.search(r"argument VERB: invalid choice: '(.*?)' \(choose", message)
        if mistyped is None:
            super().error(message)
        name = mistyped[1]
        is_config = name.removesuffix(".yaml") in examples() or name.endswith(".yaml")
        hint = f" did you mean '{self.prog} train {name}'?" if is_config else nearest(name, self.verbs)
        super().error(f"no verb {name!r};{hint} there are {', '.join(self.verbs)}")


class _VerbParser(argparse.ArgumentParser):
    """Its help may end with what takes time to make."""

    helped: Callable[[], str] | None = None

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.helped()}\n" if self.helped else "")


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        found = {}
        for package in ("torch", "transformers", "ray", "sglang"):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = "not installed"
        others = ", ".join(f"{package} {version}" for package, version in found.items())
        print(f"rlinf_vl {rlinf_vl.__version__} (Python {sys.version.split()[0]}, {others})")
        parser.exit()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The verb and its arguments. Exits with 2 and a line on what is wrong, or with 0 where help was asked for."""
    in_path = os.path.basename(sys.argv[0]) == COMMAND
    parser = _MainParser(
        prog=COMMAND if in_path else "python -m rlinf_vl",
        description="Reinforcement learning for vision-language models.",
    )
    parser.add_argument("--version", action=_Version, help="print the versions of this and of what it runs on")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_VerbParser)

    def verb(name: str, about: str, helped: Callable[[], str] | None = None) -> Any:
        """Returns the method that adds an argument to a new verb; `helped` makes what its help ends with."""
        made = verbs.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        made.helped = helped
        return made.add_argument

    argument = verb("train", "run one experiment", helped=configs_and_keys)
    _config_and_overrides(argument)
    argument("--check", action="store_true", help="only say whether it could run: config, data, model, folders")

    trust_help = "run the Python that the checkpoint's run brings along in its config.yaml"
    argument = verb("eval", "measure a model: pass@k with standard errors, tables, trajectories")
    _config_and_overrides(argument, more="; checkpoint=DIR (a run's folder, or checkpoints/global_step_N) or model=DIR")
    argument("--samples", type=int, default=1, metavar="K", help="answers to each problem (default 1)")
    argument(
        "--by",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a table by this column of the data; may be repeated",
    )
    argument(OPTION, action="store_true", help=f"{trust_help}, beyond what this config says itself")

    argument = verb("toy", "make an embedded task's data and its warm-started checkpoint (cached)")
    argument("name", nargs="?", choices=TOYS, default="toy", help="the task; toy unless named")
    argument("--seed", type=int, default=None, help="seed of the checkpoint; the default is the one configs use")

    argument = verb("export", "turn a checkpoint into a Hugging Face model, as a folder or on the hub")
    argument("checkpoint", help="a run's folder (its newest checkpoint), or checkpoints/global_step_N; also a URL")
    argument("output", type=Path, nargs="?", help="folder to write; must be empty or absent; left out: only --push")
    argument(
        "--push", metavar="OWNER/NAME", help="repository on the Hugging Face hub to write to; made if it isn't there"
    )
    argument("--private", action="store_true", help="make that repository a private one")
    argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="dtype of the weights")
    argument(
        "--adapters", action="store_true", help="write a LoRA run's adapters, for peft, instead of the merged model"
    )
    argument(OPTION, action="store_true", help=trust_help)

    argument = verb("watch", "follow a run on this terminal")
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument("--once", action="store_true", help="print one page and end")

    argument = verb("timeline", "merge what every process did when into a trace for ui.perfetto.dev")
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument("--output", type=Path, default=None, help="the file; the default is RUN_DIR/timeline.json")

    argument = verb("report", "one HTML file on a run, or on several side by side")
    argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="runs, going or ended; one folder of runs: a table",
    )
    argument("--output", type=Path, default=None, help="the file; the default is report.html in the first run's folder")

    argument = verb("check-env", "play an environment with random and hostile answers; say what breaks its contract")
    argument("env_class", metavar="NAME", help="as rollout.env_class: a name, module:Class or path/to/file.py:Class")
    argument("overrides", nargs="*", metavar="key=value", help="keywords of its constructor; data.* for --data")
    argument("--data", metavar="FILE", help="rows to start it with, as in data.train_data_paths")
    argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="for one call (default 60)")

    argument = verb("check-reward", "try a reward function on good, bad and hostile answers; say what it pays")
    argument("function", metavar="NAME", help="as in reward.functions: a name, module:name or path/to/file.py:name")
    argument("overrides", nargs="*", metavar="key=value", help="keywords of the function; data.* for --data")
    argument("--data", metavar="CONFIG|FILE", help="rows to try it on: a data set, or a config's training data")
    argument("--time-limit", type=float, default=10.0, metavar="SECONDS", help="for one answer (default 10)")

    argument = verb("check-data", "read a data set whole: what is in it, what is damaged, what limits would leave out")
    _config_and_overrides(
        argument,
        config_help="; or a file, folder or hf://owner/name of data (rollout.model.model_path=… counts tokens)",
    )
    argument("--output", type=Path, metavar="FILE.html", help="the page; the figures go beside it as FILE.json")
    argument("--workers", type=int, default=0, metavar="N", help="processes (default: one for each core)")

    argument = verb("doctor", "what this machine has, and what a config would need")
    _config_and_overrides(argument, nargs="?", config_help="; without one, the machine alone")

    argument = verb("preflight", "what a config takes of each GPU's memory; needs no GPU")
    _config_and_overrides(argument)
    argument("--gpus", type=int, default=1, help="GPUs in each machine (default 1)")
    argument("--gpu-memory", type=float, default=80, metavar="GB", help="as printed on the card (default 80)")
    argument("--nodes", type=int, default=1, help="machines (default 1)")

    argument = verb("config", "show configuration keys: all of them with their defaults, or what one means and may be")
    argument("key", nargs="?", metavar="KEY", help="a key, a section or a part of a key's name").completer = (
        lambda **_: [*config_sections(), *config_keys()]
    )

    argument = verb("convert-config", f"write a config of {', '.join(SYSTEMS.values())} as one of ours")
    argument("file", type=Path, metavar="FILE", help="YAML, a script (key=value or --key value), Python or a notebook")
    argument("--from", dest="system", choices=SYSTEMS, help="whose it is; found by its keys unless named")
    argument("--output", type=Path, metavar="YAML", help="the file to write; standard output unless named")

    argument = verb("new", "write a commented start of something of your own into a file here")
    argument("kind", choices=KINDS, help="what to begin")
    argument("name", metavar="NAME", help="its name, or the path of its file without ending")

    argument = verb("completion", f"print what completes '{COMMAND}' in your shell; its first lines say how to use it")
    argument("shell", choices=("bash", "zsh", "fish"), nargs="?", default="bash", help="bash unless named")

    parser.verbs = list(verbs.choices)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, rest = parser.parse_known_args(argv)  # an option among a run's overrides leaves those after it over
    takes_overrides = "overrides" in arguments
    if dashed := [text for text in rest if text.startswith("-")] if takes_overrides else rest:
        plain = [text.lstrip("-") for text in dashed if text.lstrip("-").partition("=")[0] in config_keys()]
        if sweep := {"--multirun", "-m"}.intersection(dashed):
            parser.error(f"{sweep.pop()}: {ONE_RUN}")
        said = f": {' '.join(plain)}" if plain else ""
        hint = f"; overrides are written key=value, without dashes{said}" if takes_overrides else ""
        parser.error(f"unrecognized arguments: {' '.join(dashed)}{hint}")
    if rest:
        arguments.overrides += rest
    return arguments


def _config_and_overrides(argument: Any, nargs: str | None = None, config_help: str = "", more: str = "") -> None:
    config = argument("config", nargs=nargs, help=f"name of a config, or path of a YAML file{config_help}")
    config.completer = complete_config
    text = f"key=value, such as runner.max_steps=3; '{COMMAND} config' shows the keys{more}"
    argument("overrides", nargs="*", help=text).completer = complete_override
