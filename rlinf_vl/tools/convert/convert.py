"""The conversion of another system's file into our config, with the outcome of each of its keys.

Tables map single keys (`rlinf_vl.tools.convert.tables`), and rules map several keys together
(`quantities`). The schema accepts the result: a value that it would refuse is replaced by the
nearest one that it accepts, with a remark.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vl.config.keys import config_keys, set_key, suggestion
from rlinf_vl.config.schema import Config
from rlinf_vl.config.systems import SYSTEMS
from rlinf_vl.config.validate import value_problems
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.convert import data_rules
from rlinf_vl.tools.convert import quantities as rules
from rlinf_vl.tools.convert.files import near, read_settings
from rlinf_vl.tools.convert.quantities import BadQuantity, Derived, Quantities
from rlinf_vl.tools.convert.tables import UNSAID, Row, Table, hint, system_of, table
from rlinf_vl.tools.convert.values import CONVERSIONS, Unreadable, plain

Kind = Literal["mapped", "dropped", "refused", "unknown"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Values of keys that every run needs, where the file has none.
PLACEHOLDERS = {
    "data.train_data_paths": ["PATH/TO/train.parquet"],
    "rollout.model.model_path": "PATH/TO/MODEL",
    "runner.experiment_name": "converted",
}
#: System → its built-in configs, whose values are the defaults in its table.
_BUILT_IN_BASES = {"verl": ("ppo_trainer",)}


class Outcome(NamedTuple):
    """The outcome of one key of the other system.

    Attributes:
        key: its dotted name.
        value: its value in the file.
        kind: whether the key was mapped, dropped, refused, or is unknown.
        text: our keys if it was mapped, joined by " and "; otherwise the reason.
    """

    key: str
    value: Any
    kind: Kind
    text: str


class Setting(NamedTuple):
    """A value of our config, and the comment after it."""

    value: Any
    comment: str


@dataclass
class Conversion:
    """A config of ours, and the outcome of each key of the other system.

    Attributes:
        system: the other system's name.
        settings: our dotted name → value and comment.
        outcomes: their dotted name → outcome.
        missing: names of configs that the file is based on and that were not found.
        typed: the same settings in our schema, which checks them.
    """

    system: str
    settings: dict[str, Setting] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    typed: DictConfig = field(default_factory=lambda: OmegaConf.structured(Config))

    def of(self, kind: Kind) -> list[Outcome]:
        """Return the outcomes of one kind."""
        return [outcome for outcome in self.outcomes.values() if outcome.kind == kind]

    @property
    def written(self) -> dict[str, Any]:
        """Our dotted name → value."""
        return {key: setting.value for key, setting in self.settings.items()}

    def value(self, key: str) -> Any:
        """Return the value of one of our keys: our default where it is not set."""
        setting = self.settings.get(key)
        return setting.value if setting else config_keys()[key].default

    def add(self, key: str, value: Any, kind: Kind, text: str) -> None:
        """Set the outcome of one of their keys, in place of an earlier one."""
        self.outcomes[key] = Outcome(key, value, kind, text)

    def put(self, key: str, value: Any, comment: str) -> None:
        """Set one of our keys. Raises ValueError: the schema refuses the value."""
        try:
            set_key(self.typed, key, value)
        except OmegaConfBaseException:
            raise ValueError(f"{value!r} is no value of {key}") from None
        value = OmegaConf.select(self.typed, key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for problem in value_problems(key, value):
            raise ValueError(problem)
        self.settings[key] = Setting(value, comment)

    def change(self, key: str, changed: Any, why: str) -> None:
        """Set one of our keys anew; `why` goes behind the comment that it has."""
        old = self.settings.get(key)
        self.put(key, changed, _comment([old.comment] if old and old.comment else [], why))


def convert_file(path: Path, system: str | None = None) -> Conversion:
    """Return a file's settings as ours.

    Args:
        path: the file.
        system: one of `SYSTEMS`; None: the system that has the file's keys.

    Raises:
        ConfigError: the file can't be read, or its system is none of `SYSTEMS`.
    """
    # Ours are in every system's files, so only the others tell the system.
    source = read_settings(path)
    system = system or system_of([key for key in source.settings if key not in config_keys()])
    if system is None:
        names = ", ".join(SYSTEMS.values())
        raise ConfigError(
            f"config {str(path)!r}: no keys of {names} that aren't ours are in it; name its system "
            "with --from"
        )
    conversion = convert(
        table(system),
        source.settings,
        lambda name: near(path, name),
        CONVERSIONS["name"](path.stem),
    )
    conversion.missing = [
        base for base in source.missing if Path(base).stem not in _BUILT_IN_BASES.get(system, ())
    ]
    if system != "rlinf":  # its bases configure its engines
        _refuse_missing(conversion)
    for word in source.unread:
        reason = "it is no key=value and no --key: write the setting that it stands for"
        conversion.add(f"word {word}", word, "refused", reason)
    if system == "verl" and "reward.functions" not in conversion.settings:
        conversion.add(
            "data_source",
            "a column of the rows",
            "refused",
            "without custom_reward_function verl grades each row by the function of its data "
            "source: name the one of yours in reward.functions (docs/rewards.md), math for "
            "geometry3k",
        )
    return conversion


def _refuse_missing(conversion: Conversion) -> None:
    """Add missing bases as refused, with the keys whose values they may set."""
    default = f"{conversion.system}'s default"
    guessed_keys = [
        key for key, setting in conversion.settings.items() if setting.comment.endswith(default)
    ]
    for key in guessed_keys if conversion.missing else ():
        value, comment = conversion.settings[key]
        conversion.settings[key] = Setting(
            value, f"{comment}; {conversion.missing[0]} may say otherwise"
        )
    for base in conversion.missing:
        reason = "no such file near it: put it there and convert again"
        if guessed_keys:
            reason += f"; until then these are guesses, the defaults of {conversion.system}: {', '.join(guessed_keys)}"
        conversion.add(f"config {base}", "not found", "refused", reason)


def convert(
    key_table: Table, theirs: Mapping[str, Any], find: Callable[[str], Path | None], name: str
) -> Conversion:
    """Return settings of another system as ours.

    Args:
        key_table: the table of the system.
        theirs: dotted name → value, as in the file.
        find: returns the file of a name in `theirs`, or None.
        name: the run's name if `theirs` has none.
    """
    conversion = Conversion(key_table.name)
    # Tables have some mappings, such as a function's kwargs, as one key.
    theirs = _gathered(key_table, theirs)
    role_values, sources = _sort(key_table, theirs, conversion)
    # A default of their system that differs from ours must be written, too.
    defaults = {}
    for row in key_table.rows.values():
        if row.default is UNSAID or row.theirs in theirs:
            continue
        try:
            value = _converted(row, row.default)
        except ValueError as error:
            conversion.add(
                row.theirs, row.default, "refused", f"{conversion.system}'s default: {error}"
            )
            continue
        if row.role:
            defaults.setdefault(row.role, value)
        elif (
            row.to[0] not in conversion.settings
            and value is not None
            and value != config_keys()[row.to[0]].default
        ):
            conversion.put(row.to[0], value, f"{key_table.name}'s default")
    for key, (value, note) in key_table.always.items():
        if key not in conversion.settings:
            conversion.put(key, value, note)
    unset_defaults = {role: value for role, value in defaults.items() if role not in role_values}
    q = Quantities(role_values, unset_defaults, find)
    _derive(q, sources, conversion)
    for role, reason in q.refused.items():
        for key in sources.get(role, ()):
            # A rule marks a key that needs no counterpart by this prefix.
            kind = "dropped" if reason.startswith("dropped: ") else "refused"
            conversion.add(key, theirs[key], kind, reason.removeprefix("dropped: "))
    for key, value in PLACEHOLDERS.items():
        if key not in conversion.settings:
            placeholder = name if key == "runner.experiment_name" else value
            conversion.put(key, placeholder, "not in the file: put yours")
    _fit(conversion)
    return conversion


def _gathered(key_table: Table, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those keys as one mapping for which the table has one row."""
    gathered: dict[str, Any] = {}
    for key, value in theirs.items():
        parents = itertools.accumulate(key.split(".")[:-1], "{}.{}".format)
        parent = None
        if key_table.row(key) is None:
            parent = next(
                (name for name in parents if name in key_table.rows and name not in theirs), None
            )
        if parent is None:
            gathered[key] = value
        else:
            gathered.setdefault(parent, {})[key.removeprefix(f"{parent}.")] = value
    return gathered


def _sort(
    table: Table, theirs: Mapping[str, Any], conversion: Conversion
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Set the keys that have one of ours; return values by role, and the keys of each role."""
    role_values: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    for key, value in theirs.items():
        row = table.row(key)
        if row is None:
            conversion.add(
                key,
                value,
                "unknown",
                f"{table.name} has no such key that is known here;{hint(key) or suggestion(key)}",
            )
            continue
        is_dropped = row.kind == "dropped"
        unusable: Kind = "dropped" if is_dropped else "refused"
        if isinstance(value, Unreadable):
            reason = f"its value is not in the file ({value}): write it in yourself"
            conversion.add(key, value, unusable, row.why if is_dropped else reason)
            continue
        try:
            ours = _converted(row, value)
            if (
                row.kind == "mapped"
                and not row.role
                and (ours is not None or _may_be_null(row.to[0]))
            ):
                # The comment names their key only where ours has another name.
                conversion.put(
                    row.to[0], ours, _comment([key] if key != row.to[0] else [], row.note)
                )
        except (ValueError, TypeError) as error:
            conversion.add(key, value, unusable, str(error))
            continue
        if row.kind != "mapped":
            conversion.add(key, value, "dropped", row.why if is_dropped else "as it is here")
        elif ours is None and row.role != "tis" and (row.role or not _may_be_null(row.to[0])):
            conversion.add(key, value, "dropped", "null: the default is taken")
        # A pattern may match several keys; ours has room for one value.
        elif row.is_pattern and row.role in role_values:
            conversion.add(
                key, value, "refused", f"one only here: that of {sources[row.role][0]} is taken"
            )
        elif row.role:
            # Offloading is one switch here: on if any of theirs is.
            combined = (
                bool(role_values.get(row.role)) or bool(ours) if row.role == "offload" else ours
            )
            role_values[row.role] = combined
            sources.setdefault(row.role, []).append(key)
            conversion.add(key, value, "mapped", " and ".join(row.to))
        else:
            conversion.add(key, value, "mapped", row.to[0])
    return role_values, sources


def _converted(row: Row, value: Any) -> Any:
    """Return their value as ours; None leaves our default.

    Raises:
        ValueError: the value is refused or dropped, for the reason in the message.
    """
    if row.same is not None:
        if value in row.same or value is None:
            return None
        raise ValueError(row.why)
    if row.values is not None:
        our_values = {plain(theirs): ours for theirs, ours in row.values.items()}
        if plain(value) not in our_values:
            if value is None:
                return None
            allowed = ", ".join(str(theirs) for theirs in row.values)
            raise ValueError(row.why or f"{value!r} is not one of {allowed}")
        return our_values[plain(value)]
    # A refused feature that is switched off refuses nothing.
    if row.kind == "refused":
        if value in (None, False, "", [], {}, 0, -1):  # the feature is off
            return None
        raise ValueError(row.why)
    return CONVERSIONS[row.by](value) if row.by else value


def _may_be_null(key: str) -> bool:
    """Return whether null is a value of one of our keys."""
    return type(None) in get_args(config_keys()[key].type)


def _derive(q: Quantities, sources: Mapping[str, list[str]], conversion: Conversion) -> None:
    """Apply every rule; leave out our defaults where no key of the file is about them."""

    def apply(rule: Callable[[Quantities], Iterator[Derived]]) -> None:
        """Put the settings of one rule, each with the file's keys that it comes from."""
        # A rule reads roles through `q`, so `q.used` shows which keys its settings come from.
        q.used.clear()
        try:
            derived = list(rule(q))
            source_keys = [key for role in sorted(q.used) for key in sources.get(role, ())]
            for key, value, note in derived:
                relevant_keys = [
                    name for name in source_keys if _about(conversion.outcomes[name], key)
                ]
                if relevant_keys or value != config_keys()[key].default:
                    remark = note or ("" if source_keys else f"{conversion.system}'s default")
                    try:
                        conversion.put(key, value, _comment(relevant_keys, remark))
                    except ValueError as error:
                        for name in relevant_keys:
                            conversion.add(
                                name, conversion.outcomes[name].value, "refused", str(error)
                            )
        except BadQuantity as error:  # apply the rule again without the bad value
            q.file_values.pop(error.role)
            q.refused[error.role] = str(error)
            apply(rule)

    # The order counts: a rule may need the settings of those before it.
    apply(rules.lengths)
    group_size = int(conversion.value("algorithm.group_size"))
    apply(lambda q: rules.batches(q, group_size))
    max_length = int(conversion.value("runner.seq_length"))
    apply(lambda q: rules.micro_batches(q, max_length))
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
    steps = max(0, int(conversion.value("runner.max_steps")))
    minibatches = int(conversion.value("algorithm.n_minibatches"))
    apply(lambda q: rules.optimizer(q, steps * minibatches))


def _about(outcome: Outcome, key: str) -> bool:
    """Return whether a key of theirs was mapped to this key of ours."""
    return key in outcome.text.split(" and ")


def _comment(keys: list[str], note: str = "") -> str:
    """Return the comment of a setting: their keys, and a remark."""
    return "; ".join(part for part in (", ".join(keys), note) if part)


def _fit(conversion: Conversion) -> None:
    """Change settings that the schema refuses in combination, each with a remark."""
    # The order counts: a later change reads what earlier ones have set.
    _fit_lengths(conversion)
    _fit_adapters(conversion)
    _fit_groups(conversion)
    _fit_corrections(conversion)
    _fit_rewards(conversion)
    _fit_device(conversion)


def _fit_lengths(conversion: Conversion) -> None:
    """Raise the longest sequence to prompt and answer, and a micro-batch to its sequences."""
    value, change = conversion.value, conversion.change
    longest = value("runner.seq_length")
    prompt, budget = value("data.max_prompt_length"), value("runner.max_tokens_per_mbs")
    for section in ("sampling_params", "val_sampling_params"):
        max_new_tokens = value(f"algorithm.{section}.max_new_tokens")
        if isinstance(max_new_tokens, int) and prompt + max_new_tokens > longest:
            longest = prompt + max_new_tokens
            change("runner.seq_length", longest, "raised to the longest prompt and its answer")
    # With packing a micro-batch holds at least one sequence, without it as many as configured.
    sequences = 1 if value("runner.enable_dynamic_batch_size") else value("actor.micro_batch_size")
    if isinstance(budget, int) and budget < longest * sequences:
        change(
            "runner.max_tokens_per_mbs",
            longest * sequences,
            f"raised from {budget}: {sequences} of the longest sequence",
        )


def _fit_adapters(conversion: Conversion) -> None:
    """Leave out what LoRA implies and can't combine with."""
    value, change = conversion.value, conversion.change
    if value("actor.model.is_lora"):
        conversion.settings.pop("actor.model.freeze_vision_tower", None)  # LoRA implies it
        if value("actor.fsdp_config.gradient_checkpointing_use_reentrant"):
            change(
                "actor.fsdp_config.gradient_checkpointing_use_reentrant",
                False,
                "true there: no gradients behind embeddings",
            )
        if value("actor.model.lora.quantization") == "nf4" and value(
            "actor.fsdp_config.cpu_offload"
        ):
            change(
                "actor.fsdp_config.cpu_offload", False, "true there: packed weights are not moved"
            )


def _fit_groups(conversion: Conversion) -> None:
    """Make groups that can be decoded together and compared."""
    value, change = conversion.value, conversion.change
    group = value("algorithm.group_size")
    if group > value("rollout.max_running_requests"):
        change("rollout.max_running_requests", group, "a group is decoded together")
    if group == 1 and value("algorithm.adv_type") != "reinforce_plus_plus":
        change(
            "algorithm.group_size",
            8,
            "1 there: advantages come from groups here, so choose at least 2",
        )


def _fit_corrections(conversion: Conversion) -> None:
    """Leave corrections of sampling only where their logprobs can be computed."""
    value, change = conversion.value, conversion.change
    # top_p and top_k truncate the distribution from which the engine samples.
    is_truncated = (
        value("algorithm.sampling_params.top_p") != 1
        or value("algorithm.sampling_params.top_k") != 0
    )
    for key in ("level", "low", "high", "veto") if is_truncated else ():
        if value(f"algorithm.rejection.{key}") is not None:
            change(f"algorithm.rejection.{key}", None, "can't correct for top_p or top_k")
    if value("algorithm.importance_sampling_fix"):
        if is_truncated:
            change("algorithm.importance_sampling_fix", False, "can't correct for top_p or top_k")
            if value("algorithm.importance_sampling_normalize") != "none":
                change("algorithm.importance_sampling_normalize", "none", "there are no weights")
        elif not value("rollout.return_logprobs"):
            change("rollout.return_logprobs", True, "importance_sampling_fix needs them")
        if value("algorithm.recompute_logprobs") == "false":
            change(
                "algorithm.recompute_logprobs",
                "auto",
                "importance_sampling_fix needs the trainer's",
            )
    elif value("algorithm.recompute_logprobs") == "false" and not value("rollout.return_logprobs"):
        change("rollout.return_logprobs", True, "recompute_logprobs: false needs them")


def _fit_rewards(conversion: Conversion) -> None:
    """Make answers differ, and rewards and penalties of them ones that the schema accepts."""
    value, change = conversion.value, conversion.change
    if value("algorithm.sampling_params.temperature") == 0:
        change(
            "algorithm.sampling_params.temperature", 1.0, "0 there: greedy groups have no spread"
        )
    if value("reward.reward_max_val") <= value("reward.reward_min_val"):
        change(
            "reward.reward_min_val",
            value("reward.reward_max_val") - 1.0,
            "a right answer has to pay more",
        )
    per_reward = value("algorithm.reward_normalization") == "per_reward"
    if per_reward and value("algorithm.normalize_advantages") is False:
        change(
            "algorithm.normalize_advantages",
            True,
            "TRL's normalize_then_sum divides by deviations whatever scale_rewards says",
        )
    if value("algorithm.kl_placement") == "reward" and value("algorithm.overlong.filter"):
        change(
            "algorithm.overlong.filter", False, "true there: what is left out of the loss has no KL"
        )
    max_answer = value("algorithm.sampling_params.max_new_tokens")
    if max_answer and value("algorithm.overlong.buffer") >= max_answer:
        change("algorithm.overlong.buffer", max_answer - 1, "shorter than the longest answer")


def _fit_device(conversion: Conversion) -> None:
    """Leave out offloading, engines' settings and dtypes that the chosen device does not have."""
    value, change = conversion.value, conversion.change
    if value("actor.enable_offload") and value("actor.fsdp_config.cpu_offload"):
        change("actor.enable_offload", False, "fsdp_config.cpu_offload does it all the time")
    if value("rollout.rollout_backend") == "torch":
        conversion.settings.pop("rollout.tensor_parallel_size", None)
        for key in [key for key in conversion.settings if key.startswith("rollout.sglang.")]:
            del conversion.settings[key]
    if value("cluster.device") == "cpu":
        for key in ("actor.enable_offload", "actor.fsdp_config.cpu_offload"):
            conversion.settings.pop(key, None)
    if value("actor.fsdp_config.mixed_precision.param_dtype") == "fp16":
        change("actor.fsdp_config.mixed_precision.param_dtype", "bf16", "fp16 needs a loss scaler")
