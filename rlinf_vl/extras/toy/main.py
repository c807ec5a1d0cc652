"""The verb `toy`: make an embedded task's data and checkpoint, and print where they lie."""

import argparse

from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.extras.toy.task import toy_dataset_path, toy_of


def main(arguments: argparse.Namespace) -> None:
    """Print a task's summary and the paths of its data and checkpoint."""
    print(toy_of(arguments.name).summary())
    for split in ("train", "val"):
        print(f"{split} data: {toy_dataset_path(split, arguments.name)}")
    seed = {} if arguments.seed is None else {"seed": arguments.seed}
    print(f"checkpoint: {toy_checkpoint_path(arguments.name, **seed)}")
