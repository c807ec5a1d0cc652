"""The arguments of the verb `eval`.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from typing import Any

from rlinf_vl.cli.parser_parts import TRUST_HELP, add_config_and_overrides
from rlinf_vl.extras.export.run_code import OPTION


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
