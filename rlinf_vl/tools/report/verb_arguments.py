"""The arguments of the verbs that show runs: a function for each, named as its verb.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from pathlib import Path
from typing import Any

from rlinf_vl.cli.parser_parts import TRUST_HELP
from rlinf_vl.extras.export.run_code import OPTION


def watch(argument: Any) -> None:
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument("--once", action="store_true", help="print one page and end")


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


def timeline(argument: Any) -> None:
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument(
        "--output", type=Path, default=None, help="the file; the default is RUN_DIR/timeline.json"
    )
