"""The verbs of the command line and their arguments, help and completion."""

import argparse
import os
import sys
from collections.abc import Sequence

from rlinf_vl.cli.parser_parts import (
    COMMAND,
    MainParser,
    VerbParser,
    VersionAction,
)
from rlinf_vl.cli.verbs import VERBS
from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.overrides import ONE_RUN
from rlinf_vl.config.parts import named


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the verb and its arguments. Exits with 2 and a line on the mistake, or with 0 after
    printing help."""
    # Usage lines show the command as the user typed it.
    in_path = os.path.basename(sys.argv[0]) == COMMAND
    parser = MainParser(
        prog=COMMAND if in_path else "python -m rlinf_vl",
        description="Reinforcement learning for vision-language models.",
    )
    parser.add_argument(
        "--version",
        action=VersionAction,
        help="print the versions of rlinf_vl, Python and packages",
    )
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=VerbParser
    )

    for name, verb in VERBS.items():
        # In the list of verbs the summary is a phrase, in the help of its verb a sentence.
        sentence = f"{verb.summary[0].upper()}{verb.summary[1:]}."
        verb_parser = verbs.add_parser(name, help=verb.summary, description=sentence)
        verb_parser.epilog_text = verb.epilog_text
        named(verb.arguments)(verb_parser.add_argument)
    parser.verbs = list(verbs.choices)
    # Set by the shell when it asks for completions.
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    # An option among overrides ends their list for argparse: those after it are not parsed.
    arguments, unparsed = parser.parse_known_args(argv)
    takes_overrides = "overrides" in arguments
    unknown = [text for text in unparsed if text.startswith("-")] if takes_overrides else unparsed
    if unknown:
        overrides = [
            text.lstrip("-")
            for text in unknown
            if text.lstrip("-").partition("=")[0] in config_keys()
        ]
        # An option of Hydra; `train` has it.
        if sweep := {"--multirun", "-m"}.intersection(unknown):
            parser.error(f"{sweep.pop()}: {ONE_RUN}")
        correction = f": {' '.join(overrides)}" if overrides else ""
        hint = (
            f"; overrides are written key=value, without dashes{correction}"
            if takes_overrides
            else ""
        )
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if unparsed:
        arguments.overrides += unparsed
    return arguments
