"""The arguments of the verbs that compare implementations: a function for each, named as its verb.

`argument` is the verb's `ArgumentParser.add_argument`.
"""

from pathlib import Path
from typing import Any

from rlinf_vl.extras.export.run_code import OPTION


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
