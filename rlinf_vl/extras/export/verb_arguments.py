"""The arguments of the verb `export`.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from pathlib import Path
from typing import Any

from rlinf_vl.cli.parser_parts import TRUST_HELP
from rlinf_vl.extras.export.run_code import OPTION


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
