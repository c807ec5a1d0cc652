"""The arguments of the verb `serve`.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from typing import Any

from rlinf_vl.cli.parser_parts import TRUST_HELP
from rlinf_vl.extras.export.run_code import OPTION


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
