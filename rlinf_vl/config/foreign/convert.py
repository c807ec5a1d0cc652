"""`convert-config`: the settings of another system's file as a config of ours, and what became of each of its keys.

Tables say what becomes of a key (`rlinf_vl.config.aliases`), rules what of several together (`quantities`). What is
written is accepted by the schema: where theirs would not be, the nearest that is, with a remark.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vl.config.aliases import SYSTEMS, UNSAID, Row, Table, hint, system_of, table
from rlinf_vl.config.foreign import data_rules
from rlinf_vl.config.foreign import quantities as rules
from rlinf_vl.config.foreign.files import near, read_settings
from rlinf_vl.config.foreign.quantities import BadQuantity, Derived, Quantities
from rlinf_vl.config.foreign.values import CONVERSIONS, Unreadable, plain
from rlinf_vl.config.keys import config_keys, set_key, suggestion
from rlinf_vl.config.schema import Config
from rlinf_vl.config.validate import value_problems
from rlinf_vl.errors import ConfigError

Kind = Literal["mapped", "dropped", "refused", "unknown"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: What stands in a config for what no file says and every run needs.
PLACEHOLDERS = {
    "data.train_data_paths": ["PATH/TO/train.parquet"],
    "rollout.model.model_path": "PATH/TO/MODEL",
    "runner.experiment_name": "converted",
}
#: System → configs of its own whose values its table has as defaults.
_OWN_BASES = {"verl": ("ppo_trainer",)}


class Outcome(NamedTuple):
    """What became of one of their keys."""

    key: str
    value: Any
    kind: Kind
    text: str


class Setting(NamedTuple):
    """A value of ours, and the comment behind it."""

    value: Any
    comment: str


@dataclass
class Conversion:
    """A config of ours (by dotted name), and what became of each of theirs."""

    system: str
    settings: dict[str, Setting] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    #: Files that it builds upon and that stand nowhere near: what they say is not known.
    missing: list[str] = field(default_factory=list)
    typed: DictConfig = field(default_factory=lambda: OmegaConf.structured(Config))

    def of(self, kind: Kind) -> list[Outcome]:
        return [outcome for outcome in self.outcomes.values() if outcome.kind == kind]

    @property
    def written(self) -> dict[str, Any]:
        """Our key → value."""
        return {key: setting.value for key, setting in self.settings.items()}

    def add(self, key: str, value: Any, kind: Kind, text: str) -> None:
        self.outcomes[key] = Outcome(key, value, kind, text)

    def put(self, key: str, value: Any, comment: str) -> None:
        """Set a key of ours. Raises ValueError: the schema refuses the value."""
        try:
            set_key(self.typed, key, value)
        except OmegaConfBaseException:
            raise ValueError(f"{value!r} is no value of {key}") from None
        value = OmegaConf.select(self.typed, key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for problem in value_problems(key, value):
            raise ValueError(problem)
        self.settings[key] = Setting(value, comment)


def convert_file(path: Path, system: str | None = None) -> Conversion:
    """The settings of a file as ours.

    Args:
        system: one of `SYSTEMS`; None: the one whose keys they are.

    Raises:
        ConfigError: the file can't be read, or is of no system that is known.
    """
    source = read_settings(path)
    system = system or system_of([key for key in source.said if key not in config_keys()])
    if system is None:
        names = ", ".join(SYSTEMS.values())
        raise ConfigError(
            f"config {str(path)!r}: no keys of {names} that aren't ours are in it; name its system with --from"
        )
    made = convert(table(system), source.said, lambda name: near(path, name), CONVERSIONS["name"](path.stem))
    made.missing = [base for base in source.missing if Path(base).stem not in _OWN_BASES.get(system, ())]
    if system != "rlinf":  # whose bases say how its engines run
        _refuse_missing(made)
    return made


def _refuse_missing(made: Conversion) -> None:
    """List bases that were not found as refused, with the keys whose values they may say otherwise."""
    default = f"{made.system}'s default"
    guessed = [key for key, setting in made.settings.items() if setting.comment.endswith(default)]
    for key in guessed if made.missing else ():
        value, comment = made.settings[key]
        made.settings[key] = Setting(value, f"{comment}; {made.missing[0]} may say otherwise")
    for base in made.missing:
        reason = "no such file near it: put it there and convert again"
        if guessed:
            reason += f"; until then these are guesses, the defaults of {made.system}: {', '.join(guessed)}"
        made.add(f"config {base}", "not found", "refused", reason)


def convert(known: Table, theirs: Mapping[str, Any], find: Callable[[str], Path | None], name: str) -> Conversion:
    """
    Args:
        known: the table of the system.
        theirs: dotted name → value, as a file says them.
        find: a file that theirs names, or None.
        name: the run's, if theirs has none.
    """
    made = Conversion(known.name)
    theirs = _gathered(known, theirs)
    said, sources = _sort(known, theirs, made)
    defaults = {}
    for row in known.rows.values():
        if row.default is UNSAID or row.theirs in theirs:
            continue
        try:
            value = _converted(row, row.default)
        except ValueError as error:
            made.add(row.theirs, row.default, "refused", f"{made.system}'s default: {error}")
            continue
        if row.role:
            defaults.setdefault(row.role, value)
        elif row.to[0] not in made.settings and value is not None and value != config_keys()[row.to[0]].default:
            made.put(row.to[0], value, f"{known.name}'s default")
    for key, (value, note) in known.always.items():
        if key not in made.settings:
            made.put(key, value, note)
    q = Quantities(said, {role: value for role, value in defaults.items() if role not in said}, find)
    _derive(q, sources, made)
    for role, reason in q.refused.items():
        for key in sources.get(role, ()):
            kind = "dropped" if reason.startswith("dropped: ") else "refused"
            made.add(key, theirs[key], kind, reason.removeprefix("dropped: "))
    for key, value in PLACEHOLDERS.items():
        if key not in made.settings:
            chosen = name if key == "runner.experiment_name" else value
            made.put(key, chosen, "not in the file: put yours")
    _fit(made)
    return made


def _gathered(known: Table, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """With a mapping whole where a table has a row for all of it."""
    whole: dict[str, Any] = {}
    for key, value in theirs.items():
        parents = itertools.accumulate(key.split(".")[:-1], "{}.{}".format)
        parent = next(
            (name for name in parents if name in known.rows and name not in theirs and known.row(key) is None), None
        )
        if parent is None:
            whole[key] = value
        else:
            whole.setdefault(parent, {})[key.removeprefix(f"{parent}.")] = value
    return whole


def _sort(table: Table, theirs: Mapping[str, Any], made: Conversion) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Set what has one key of ours; return what is said by role, and by which keys."""
    said: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    for key, value in theirs.items():
        row = table.row(key)
        if row is None:
            made.add(
                key, value, "unknown", f"{table.name} has no such key that is known here;{hint(key) or suggestion(key)}"
            )
            continue
        if isinstance(value, Unreadable):
            if row.kind == "dropped":
                made.add(key, value, "dropped", row.why)
            else:
                made.add(key, value, "refused", f"its value is not in the file ({value}): write it in yourself")
            continue
        try:
            ours = _converted(row, value)
            if row.kind == "mapped" and not row.role and (ours is not None or _may_be_null(row.to[0])):
                made.put(row.to[0], ours, _comment([key] if key != row.to[0] else [], row.note))
        except (ValueError, TypeError) as error:
            made.add(key, value, "dropped" if row.kind == "dropped" else "refused", str(error))
            continue
        if row.kind != "mapped":
            made.add(key, value, "dropped", row.why if row.kind == "dropped" else "off, as here")
        elif ours is None and row.role != "tis" and (row.role or not _may_be_null(row.to[0])):
            made.add(key, value, "dropped", "null: the default is taken")
        elif row.is_pattern and row.role in said:
            made.add(key, value, "refused", f"one only here: that of {sources[row.role][0]} is taken")
        elif row.role:
            combined = bool(said.get(row.role)) or bool(ours) if row.role == "offload" else ours
            said[row.role] = combined
            sources.setdefault(row.role, []).append(key)
            made.add(key, value, "mapped", " and ".join(row.to))
        else:
            made.add(key, value, "mapped", row.to[0])
    return said, sources


def _converted(row: Row, value: Any) -> Any:
    """Their value as ours. Raises ValueError: it is refused, or dropped, for the reason told."""
    if row.same is not None:
        if value in row.same or value is None:
            return None
        raise ValueError(row.why)
    if row.values is not None:
        known = {plain(theirs): ours for theirs, ours in row.values.items()}
        if plain(value) not in known:
            if value is None:
                return None
            allowed = ", ".join(str(theirs) for theirs in row.values)
            raise ValueError(row.why or f"{value!r} is not one of {allowed}")
        return known[plain(value)]
    if row.kind == "refused":
        if value in (None, False, "", [], {}, 0, -1):
            return None
        raise ValueError(row.why)
    return CONVERSIONS[row.by](value) if row.by else value


def _may_be_null(key: str) -> bool:
    return type(None) in get_args(config_keys()[key].type)


def _derive(q: Quantities, sources: Mapping[str, list[str]], made: Conversion) -> None:
    """Apply every rule; a setting that nothing said of, and that is our default, is left out."""

    def apply(rule: Callable[..., Iterator[Derived]], *arguments: int) -> None:
        q.used.clear()
        try:
            derived = list(rule(q, *arguments))
            said = [key for role in sorted(q.used) for key in sources.get(role, ())]
            for key, value, note in derived:
                relevant = [name for name in said if _about(made.outcomes[name], key)]
                if relevant or value != config_keys()[key].default:
                    remark = note or ("" if said else f"{made.system}'s default")
                    try:
                        made.put(key, value, _comment(relevant, remark))
                    except ValueError as error:
                        for name in relevant:
                            made.add(name, made.outcomes[name].value, "refused", str(error))
        except BadQuantity as error:  # without it
            q.said.pop(error.role)
            q.refused[error.role] = str(error)
            apply(rule, *arguments)

    def value(key: str) -> Any:
        return made.written.get(key, config_keys()[key].default)

    apply(rules.lengths)
    apply(rules.batches, int(value("algorithm.group_size")))
    apply(rules.micro_batches, int(value("runner.seq_length")))
    for rule in (
        rules.loss,
        rules.reference_kl,
        rules.correction,
        rules.sampling_kit,
        rules.teacher,
        rules.validation,
        rules.adapters,
        rules.machines,
        rules.resuming,
        data_rules.rewards,
        data_rules.prompts,
        data_rules.datasets,
    ):
        apply(rule)
    steps, parts = int(value("runner.max_steps")), int(value("algorithm.n_minibatches"))
    apply(rules.optimizer, max(0, steps) * parts)


def _about(outcome: Outcome, key: str) -> bool:
    return key in outcome.text.split(" and ")


def _comment(keys: list[str], note: str = "") -> str:
    return "; ".join(part for part in (", ".join(keys), note) if part)


def _fit(made: Conversion) -> None:
    """Change what the schema's rules would refuse in combination, with a remark."""

    def value(key: str) -> Any:
        return made.written.get(key, config_keys()[key].default)

    def change(key: str, changed: Any, why: str) -> None:
        before = made.settings.get(key)
        made.put(key, changed, _comment([before.comment] if before and before.comment else [], why))

    longest = value("runner.seq_length")
    prompt, budget = value("data.max_prompt_length"), value("runner.max_tokens_per_mbs")
    for part in ("sampling_params", "val_sampling_params"):
        most = value(f"algorithm.{part}.max_new_tokens")
        if isinstance(most, int) and prompt + most > longest:
            longest = prompt + most
            change("runner.seq_length", longest, "raised to the longest prompt and its answer")
    fixed = 1 if value("runner.enable_dynamic_batch_size") else value("actor.micro_batch_size")
    if isinstance(budget, int) and budget < longest * fixed:
        change("runner.max_tokens_per_mbs", longest * fixed, f"raised from {budget}: {fixed} of the longest sequence")
    if value("actor.model.is_lora"):
        made.settings.pop("actor.model.freeze_vision_tower", None)  # goes without saying
        if value("actor.fsdp_config.gradient_checkpointing_use_reentrant"):
            change(
                "actor.fsdp_config.gradient_checkpointing_use_reentrant",
                False,
                "true there: no gradients behind embeddings",
            )
        if value("actor.model.lora.quantization") == "nf4" and value("actor.fsdp_config.cpu_offload"):
            change("actor.fsdp_config.cpu_offload", False, "true there: packed weights are not moved")
    group = value("algorithm.group_size")
    if group > value("rollout.max_running_requests"):
        change("rollout.max_running_requests", group, "a group is decoded together")
    if group == 1 and value("algorithm.adv_type") != "reinforce_plus_plus":
        change("algorithm.group_size", 8, "1 there: advantages come from groups here, so choose at least 2")
    truncated = value("algorithm.sampling_params.top_p") != 1 or value("algorithm.sampling_params.top_k") != 0
    for key in ("level", "low", "high", "veto") if truncated else ():
        if value(f"algorithm.rejection.{key}") is not None:
            change(f"algorithm.rejection.{key}", None, "can't correct for top_p or top_k")
    if value("algorithm.importance_sampling_fix"):
        if truncated:
            change("algorithm.importance_sampling_fix", False, "can't correct for top_p or top_k")
        elif not value("rollout.return_logprobs"):
            change("rollout.return_logprobs", True, "importance_sampling_fix needs them")
        if value("algorithm.recompute_logprobs") == "false":
            change("algorithm.recompute_logprobs", "auto", "importance_sampling_fix needs the trainer's")
    elif value("algorithm.recompute_logprobs") == "false" and not value("rollout.return_logprobs"):
        change("rollout.return_logprobs", True, "recompute_logprobs: false needs them")
    if value("algorithm.sampling_params.temperature") == 0:
        change("algorithm.sampling_params.temperature", 1.0, "0 there: greedy groups have no spread")
    if value("reward.reward_max_val") <= value("reward.reward_min_val"):
        change("reward.reward_min_val", value("reward.reward_max_val") - 1.0, "a right answer has to pay more")
    if value("algorithm.kl_placement") == "reward" and value("algorithm.overlong.filter"):
        change("algorithm.overlong.filter", False, "true there: what is left out of the loss has no KL")
    longest = value("algorithm.sampling_params.max_new_tokens")
    if longest and value("algorithm.overlong.buffer") >= longest:
        change("algorithm.overlong.buffer", longest - 1, "shorter than the longest answer")
    if value("actor.enable_offload") and value("actor.fsdp_config.cpu_offload"):
        change("actor.enable_offload", False, "fsdp_config.cpu_offload does it all the time")
    if value("rollout.rollout_backend") == "torch":
        for key in [key for key in made.settings if key.startswith("rollout.sglang.")]:
            del made.settings[key]
    if value("cluster.device") == "cpu":
        for key in ("actor.enable_offload", "actor.fsdp_config.cpu_offload"):
            made.settings.pop(key, None)
    if value("actor.fsdp_config.mixed_precision.param_dtype") == "fp16":
        change("actor.fsdp_config.mixed_precision.param_dtype", "bf16", "fp16 needs a loss scaler")
