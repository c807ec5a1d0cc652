"""The verbs `report`, `runs` and `watch`, which read folders of runs."""

import argparse
import json

from rlinf_vl.tools.report import watch as live
from rlinf_vl.tools.report.build import build_report
from rlinf_vl.tools.report.runs_table import read_folder, runs_json, runs_table
from rlinf_vl.tools.report.sweep import build_sweep_report


def report(arguments: argparse.Namespace) -> None:
    """Write the report of runs or of a sweep, or print the table of a folder of runs."""
    if arguments.sweep:
        if len(arguments.runs) != 1:
            raise ValueError("--sweep: name one folder, that of the sweep")
        print(build_sweep_report(arguments.runs[0], arguments.output))
    elif len(arguments.runs) == 1 and (lines := read_folder(arguments.runs[0])):
        print(runs_table(lines))
    else:
        print(build_report(arguments.runs, arguments.output))


def runs(arguments: argparse.Namespace) -> None:
    """Print the runs of a folder, one a line."""
    folder = arguments.folder
    lines = read_folder(folder)
    if not lines:
        raise ValueError(
            f"{folder}: has no folders of runs; name one that has, such as runner.output_dir"
        )
    print(json.dumps(runs_json(lines), indent=1) if arguments.json else runs_table(lines))


def watch(arguments: argparse.Namespace) -> None:
    """Show a run as it goes on."""
    live.watch(arguments.run_dir, once=arguments.once)
