"""The arguments of the verbs that check: a function for each, named as its verb.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from pathlib import Path
from typing import Any

from rlinf_vl.cli.parser_parts import add_config_and_overrides


def add_json(argument: Any) -> None:
    argument("--json", type=Path, metavar="FILE", help="write the findings there, too")


def check_env(argument: Any) -> None:
    argument(
        "env_class",
        metavar="NAME",
        help="as rollout.env_class (a name, module:Class or path/to/file.py:Class), or as "
        "rollout.agent.function (path/to/file.py:function)",
    )
    argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="keywords of its constructor; data.* for --data",
    )
    argument(
        "--agent",
        action="store_true",
        help="NAME is an agent; it may be a command, such as 'python my_agent.py'",
    )
    argument("--data", metavar="FILE", help="rows to start it with, as in data.train_data_paths")
    argument(
        "--answers",
        nargs="+",
        default=[],
        metavar="ANSWER",
        help="answers to play too: texts, in their order and each by itself, or files with an "
        "answer a line and an empty line between episodes",
    )
    argument(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for one call of an environment, or for one agent (default 60)",
    )
    add_json(argument)


def check_reward(argument: Any) -> None:
    argument(
        "function",
        metavar="NAME",
        help="as in reward.functions: a name, module:name or path/to/file.py:name",
    )
    argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="keywords of the function; data.* for --data",
    )
    argument(
        "--data",
        metavar="CONFIG|FILE",
        help="rows to try it on: a data set, or a config's training data",
    )
    argument(
        "--rows",
        type=int,
        metavar="N",
        help="rows of --data, spread over it and its small columns' values (default 32; judge: 4)",
    )
    argument(
        "--time-limit",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for one answer (default 10)",
    )
    add_json(argument)


def check_data(argument: Any) -> None:
    add_config_and_overrides(
        argument,
        config_help="; or a file, folder or hf://owner/name of data (rollout.model.model_path=… counts tokens)",
    )
    argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="the page; the figures go beside it as FILE.json",
    )
    argument(
        "--workers", type=int, default=0, metavar="N", help="processes (default: one for each core)"
    )


def doctor(argument: Any) -> None:
    add_config_and_overrides(argument, nargs="?", config_help="; without one, the machine alone")
    argument(
        "--smoke",
        action="store_true",
        help="run each part of the config once here, with random weights of its model's shape",
    )
    argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="for --smoke: the time that it has (default 180; 1200 with SGLang, whose first start on a GPU "
        "compiles kernels for minutes)",
    )
    add_json(argument)
