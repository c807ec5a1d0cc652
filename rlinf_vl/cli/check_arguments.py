"""The arguments of the verbs that check: a function for each, named as its verb.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from pathlib import Path
from typing import Any

from rlinf_vl.cli.parser_parts import add_config_and_overrides
from rlinf_vl.runtime.gpu_kinds import GPU_KINDS
from rlinf_vl.runtime.run_code import OPTION


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


def prove_family(argument: Any) -> None:
    argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder, a model on the hub, or a model type of transformers, such as qwen3_vl",
    )
    argument(
        "--family",
        metavar="FILE.py:NAME",
        help="a family of your own, as rollout.model.model_type names it (default: the config's)",
    )
    argument(
        "--vision-tower",
        metavar="PATH",
        help="as actor.model.vlm.vision_encoder_attr, with --text-model",
    )
    argument(
        "--text-model",
        metavar="PATH",
        help="as actor.model.vlm.language_model_attr, with --vision-tower",
    )
    argument("--paths", metavar="A,B", help="these paths alone (default: all)")
    argument("--output", metavar="FILE.json", help="where the certificate is written")


def replay(argument: Any) -> None:
    argument("path", type=Path, metavar="RUN|FILE", help="a run's folder, or a .replay file")
    argument("--step", type=int, metavar="N", help="of a run: the step to record")
    argument("--group", type=int, metavar="K", help="of a run: this group of the step alone")
    argument(
        "--shape-only",
        action="store_true",
        help="of a run: without its weights; the replay draws random ones of their shape",
    )
    argument("--output", type=Path, metavar="FILE", help="of a run: the file to write")
    argument(
        "--minimise",
        action="store_true",
        help="of a file: also write the smallest one that shows the same difference",
    )
    argument("--json", action="store_true", help="of a file: print the outcome as JSON")
    argument(
        OPTION,
        action="store_true",
        help="load Python files that the run's config brings along",
    )


def compare_batch(argument: Any) -> None:
    argument("file", type=Path, metavar="FILE", help="a .json or .parquet file of one batch")
    argument("--json", action="store_true", help="print the outcome as JSON")


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


def preflight(argument: Any) -> None:
    add_config_and_overrides(argument)
    argument("--gpus", type=int, default=1, help="GPUs in each machine (default 1)")
    argument(
        "--gpu-memory",
        type=float,
        default=80,
        metavar="GB",
        help="as printed on the card (default 80)",
    )
    argument("--nodes", type=int, default=1, help="machines (default 1)")
    argument("--gpu-kind", choices=GPU_KINDS, help="default: the usual kind of that size")
    argument(
        "--search", action="store_true", help="look for the fastest layouts that fit, all keys"
    )
    argument("--time", action="store_true", help="estimate seconds of a step and hours, as a range")
    argument("--price", type=float, metavar="DOLLARS", help="of a GPU and hour, with --time")
    argument(
        "--host-memory", type=float, metavar="GIB", help="of a machine (default 216 for each GPU)"
    )
    argument("--prompt-tokens", type=float, help="mean of a prompt, images included")
    argument("--image-tokens", type=float, help="mean of a prompt's images")
    argument("--response-tokens", type=float, help="mean of a response")
    argument("--longest-response", type=float, help="the longest response of a step")
