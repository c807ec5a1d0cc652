"""The arguments of the verbs that train, write, and look at runs: a function for each, named as its
verb.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from pathlib import Path
from typing import Any

from rlinf_vl.cli.new import KINDS
from rlinf_vl.cli.parser_parts import add_config_and_overrides
from rlinf_vl.config.keys import config_keys, config_sections
from rlinf_vl.config.systems import SYSTEMS
from rlinf_vl.config.toys import TOYS
from rlinf_vl.runtime.run_code import OPTION

#: Python that comes with a checkpoint is executed with consent only.
TRUST_HELP = "run the Python that the checkpoint's run brings along in its config.yaml"


def train(argument: Any) -> None:
    add_config_and_overrides(argument)
    argument(
        "--check",
        action="store_true",
        help="don't train, only check config, data, model and folders",
    )
    argument(
        "-m",
        "--multirun",
        action="store_true",
        help="run each combination of the values that overrides list, such as runner.seed=1,2",
    )
    argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="for --multirun: runs at a time (default 1)",
    )


def sft(argument: Any) -> None:
    add_config_and_overrides(argument)
    argument(
        "--check",
        action="store_true",
        help="don't train, only check config, data, model and folders",
    )


def eval(argument: Any) -> None:
    add_config_and_overrides(
        argument,
        override_help="; checkpoint=DIR (a run's folder, or checkpoints/global_step_N) or model=DIR",
    )
    argument(
        "--samples", type=int, default=1, metavar="K", help="answers to each problem (default 1)"
    )
    argument(
        "--by",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a table by this column of the data; may be repeated",
    )
    argument(
        "--vision-controls",
        metavar="KINDS",
        help="ask each question again: with a blank image, another's, or one partly hidden "
        "(blank,swapped,cropped)",
    )
    argument(OPTION, action="store_true", help=f"{TRUST_HELP}, beyond what this config says itself")


def toy(argument: Any) -> None:
    argument("name", nargs="?", choices=TOYS, default="toy", help="the task; toy unless named")
    argument(
        "--seed",
        type=int,
        default=None,
        help="seed of the checkpoint (default: that of the configs)",
    )


def export(argument: Any) -> None:
    argument(
        "checkpoint",
        help="a run's folder (its newest checkpoint), or checkpoints/global_step_N; also a URL",
    )
    argument(
        "output",
        type=Path,
        nargs="?",
        help="folder to write; must be empty or absent; left out: only --push",
    )
    argument(
        "--push",
        metavar="OWNER/NAME",
        help="repository on the Hugging Face hub to write to; made if it isn't there",
    )
    argument("--private", action="store_true", help="make that repository a private one")
    argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="dtype of the weights"
    )
    argument(
        "--adapters",
        action="store_true",
        help="write a LoRA run's adapters, for peft, instead of the merged model",
    )
    argument(OPTION, action="store_true", help=TRUST_HELP)


def serve(argument: Any) -> None:
    argument(
        "folder",
        metavar="RUN|MODEL",
        help="a run's folder, a checkpoint, a model's folder, a name on the hub, or a toy's",
    )
    argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 or :: for other machines, too",
    )
    argument("--port", type=int, default=8000, help="port to listen on; 0 for any free one")
    argument("--key", help="the API key that clients must send; a new one unless named")
    argument("--device", choices=("cpu", "cuda"), help="by default cuda where there is one")
    argument("--dtype", choices=("fp32", "bf16", "fp16"), help="by default bf16 on cuda, else fp32")
    argument(
        "--temperature", type=float, default=1.0, help="of requests that name none (default 1)"
    )
    argument(
        "--max-new-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="most tokens of a reply (default 1024)",
    )
    argument(OPTION, action="store_true", help=TRUST_HELP)


def watch(argument: Any) -> None:
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument("--once", action="store_true", help="print one page and end")


def timeline(argument: Any) -> None:
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument(
        "--output", type=Path, default=None, help="the file; the default is RUN_DIR/timeline.json"
    )


def report(argument: Any) -> None:
    argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="runs, going or ended; one folder of runs: a table",
    )
    argument(
        "--output",
        type=Path,
        default=None,
        help="the file; the default is report.html in the first run's folder",
    )
    argument(
        "--sweep",
        action="store_true",
        help="one page on all runs of a folder: settings side by side, means over their seeds",
    )


def runs(argument: Any) -> None:
    argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("results"),
        metavar="FOLDER",
        help="a folder with runs in it (default: results)",
    )
    argument("--json", action="store_true", help="print the table as JSON")


def look(argument: Any) -> None:
    argument("run", type=Path, metavar="RUN_DIR", help="folder of a run or of an evaluation")
    argument(
        "--checkpoint",
        type=Path,
        default=None,
        metavar="DIR",
        help="weights that score: a run's folder, or checkpoints/global_step_N; default: those of "
        "the step, or the nearest",
    )
    argument(
        "--step", type=int, default=None, help="the step whose answers are scored; default: newest"
    )
    argument("--split", choices=("val", "train", "all"), default="val", help="which of its answers")
    argument(
        "--heat-maps",
        type=int,
        default=8,
        metavar="N",
        help="answers that get a map of each of their pictures (default 8)",
    )
    argument(
        "--forwards",
        type=int,
        default=64,
        metavar="N",
        help="the most forwards for the map of one picture (default 64)",
    )
    argument(OPTION, action="store_true", help=TRUST_HELP)


def config(argument: Any) -> None:
    argument(
        "key", nargs="?", metavar="KEY", help="a key, a section or a part of a key's name"
    ).completer = lambda **_: [*config_sections(), *config_keys()]


def convert_config(argument: Any) -> None:
    argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="YAML, a script (key=value or --key value), Python or a notebook",
    )
    argument(
        "--from",
        dest="system",
        choices=SYSTEMS,
        help="the system that it is of; by default found by its keys, and all for --explain",
    )
    argument(
        "--output",
        type=Path,
        metavar="YAML",
        help="the file to write; standard output unless named",
    )
    argument(
        "--explain",
        metavar="KEY",
        help="instead of converting a file, tell what becomes of a key or metric, "
        "or of all that end with it",
    )


def new(argument: Any) -> None:
    argument("kind", choices=KINDS, help="the kind of file")
    argument("name", metavar="NAME", help="its name, or the path of its file without ending")


def completion(argument: Any) -> None:
    argument(
        "shell",
        choices=("bash", "zsh", "fish"),
        nargs="?",
        default="bash",
        help="bash unless named",
    )
