"""The arguments of the verb `preflight`.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from typing import Any

from rlinf_vl.cli.parser_parts import add_config_and_overrides
from rlinf_vl.tools.memory.gpu_kinds import GPU_KINDS


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
