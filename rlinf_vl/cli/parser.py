"""The verbs of the command line and their arguments, help and completion."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlinf_vl.cli.keys import configs_and_keys
from rlinf_vl.cli.parser_parts import (
    COMMAND,
    MainParser,
    VerbParser,
    VersionAction,
    add_config_and_overrides,
)
from rlinf_vl.cli.writing_verbs import add_writing_verbs
from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.overrides import ONE_RUN
from rlinf_vl.config.toys import TOYS
from rlinf_vl.runtime.gpu_kinds import GPU_KINDS
from rlinf_vl.runtime.run_code import OPTION


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

    def verb(name: str, summary: str, epilog_text: Callable[[], str] | None = None) -> Any:
        """Return the method that adds an argument to a new verb; `epilog_text` makes the end of its
        help."""
        # In the list of verbs the summary is a phrase, in the help of its verb a sentence.
        verb_parser = verbs.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        verb_parser.epilog_text = epilog_text
        return verb_parser.add_argument

    # Train and evaluate.
    argument = verb("train", "run one experiment", epilog_text=configs_and_keys)
    add_config_and_overrides(argument)
    argument(
        "--check",
        action="store_true",
        help="don't train, only check config, data, model and folders",
    )
    argument(
        "-m",
        "--multirun",
        action="store_true",
        help="run each combination of the values that overrides list, such as runner.seed=1,2",
    )
    argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="for --multirun: runs at a time (default 1)",
    )

    argument = verb(
        "sft", "imitate conversations with pictures: supervised training, with a train config"
    )
    add_config_and_overrides(argument)
    argument(
        "--check",
        action="store_true",
        help="don't train, only check config, data, model and folders",
    )

    # Python that comes with a checkpoint is executed with consent only.
    trust_help = "run the Python that the checkpoint's run brings along in its config.yaml"
    argument = verb("eval", "measure a model: pass@k with standard errors, tables, trajectories")
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
    argument(OPTION, action="store_true", help=f"{trust_help}, beyond what this config says itself")

    # Make and export models.
    argument = verb("toy", "make an embedded task's data and its warm-started checkpoint (cached)")
    argument("name", nargs="?", choices=TOYS, default="toy", help="the task; toy unless named")
    argument(
        "--seed",
        type=int,
        default=None,
        help="seed of the checkpoint (default: that of the configs)",
    )

    argument = verb(
        "export", "turn a checkpoint into a Hugging Face model, as a folder or on the hub"
    )
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
    argument(OPTION, action="store_true", help=trust_help)

    argument = verb("serve", "answer OpenAI's chat API with a trained policy, for any client")
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
    argument(OPTION, action="store_true", help=trust_help)

    # Look at runs.
    argument = verb("watch", "follow a run on this terminal")
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument("--once", action="store_true", help="print one page and end")

    argument = verb(
        "timeline", "merge what every process did when into a trace for ui.perfetto.dev"
    )
    argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, still going or ended")
    argument(
        "--output", type=Path, default=None, help="the file; the default is RUN_DIR/timeline.json"
    )

    argument = verb("report", "one HTML file on a run, or on several side by side")
    argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="runs, going or ended; one folder of runs: a table",
    )
    argument(
        "--output",
        type=Path,
        default=None,
        help="the file; the default is report.html in the first run's folder",
    )
    argument(
        "--sweep",
        action="store_true",
        help="one page on all runs of a folder: settings side by side, means over their seeds",
    )

    argument = verb("runs", "a table of the runs in a folder, the newest first")
    argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("results"),
        metavar="FOLDER",
        help="a folder with runs in it (default: results)",
    )
    argument("--json", action="store_true", help="print the table as JSON")

    argument = verb("look", "score a run's answers with and without their images; heat maps")
    argument("run", type=Path, metavar="RUN_DIR", help="folder of a run or of an evaluation")
    argument(
        "--checkpoint",
        type=Path,
        default=None,
        metavar="DIR",
        help="weights that score: a run's folder, or checkpoints/global_step_N; default: those of "
        "the step, or the nearest",
    )
    argument(
        "--step", type=int, default=None, help="the step whose answers are scored; default: newest"
    )
    argument("--split", choices=("val", "train", "all"), default="val", help="which of its answers")
    argument(
        "--heat-maps",
        type=int,
        default=8,
        metavar="N",
        help="answers that get a map of each of their pictures (default 8)",
    )
    argument(
        "--forwards",
        type=int,
        default=64,
        metavar="N",
        help="the most forwards for the map of one picture (default 64)",
    )
    argument(OPTION, action="store_true", help=trust_help)

    # Check code, data and machines before a run.
    argument = verb(
        "check-env",
        "play an environment or an agent with random and hostile answers; say what breaks its contract",
    )
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

    argument = verb(
        "prove-family",
        "compare every path of a model's family with transformers, with a tiny random member of it",
    )
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

    argument = verb(
        "replay",
        "record a step of a run as a file, or run such a file in transformers' plain code, the "
        "trainer's and the engine's, and name where they part",
    )
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

    argument = verb(
        "compare-batch",
        "put another system's recorded batch through our algorithm; name the first column that "
        "differs, and why",
    )
    argument("file", type=Path, metavar="FILE", help="a .json or .parquet file of one batch")
    argument("--json", action="store_true", help="print the outcome as JSON")

    argument = verb(
        "check-reward", "try a reward function on good, bad and hostile answers; say what it pays"
    )
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

    argument = verb(
        "check-data", "examine a whole data set: content, damaged rows, rows beyond the limits"
    )
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

    argument = verb("doctor", "report what this machine has and what a config needs")
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
    argument("--json", type=Path, metavar="FILE", help="for --smoke: write the results there, too")

    argument = verb(
        "preflight", "estimate the memory that a config takes of each GPU; needs no GPU"
    )
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

    # Write configs and code.
    add_writing_verbs(verb)

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
