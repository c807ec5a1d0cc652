"""The verb `export`: a checkpoint as a folder for the hub, or its adapters for peft."""

import argparse
import importlib.util
import logging

from rlinf_vl.config.parts import load_part
from rlinf_vl.extras.export.publish import publish
from rlinf_vl.runtime.checkpoints import folder_at

log = logging.getLogger("rlinf_vl")


def main(arguments: argparse.Namespace) -> None:
    """Write the folder, and say what loads it."""
    destination = publish(
        folder_at(arguments.checkpoint),
        arguments.output,
        dtype=arguments.dtype,
        adapters=arguments.adapters,
        push=arguments.push,
        private=arguments.private,
        trust_run_code=arguments.trust_run_code,
    )
    if arguments.adapters:
        log.info(
            "wrote %s, for peft.PeftModel.from_pretrained on the run's base model", destination
        )
        return
    log.info(
        "wrote %s, for AutoModelForImageTextToText (text only: AutoModelForCausalLM), "
        "AutoTokenizer and AutoImageProcessor; AutoProcessor wants torchvision besides, "
        "for videos (%s)",
        destination,
        "installed here"
        if importlib.util.find_spec("torchvision")
        else load_part("torchvision-command")(),
    )
