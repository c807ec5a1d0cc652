"""Advice for a config that does not fit: every change is tried on a copy of the config before it is given.

A combination of changes is given only if `validate_config` accepts the copy and the ledger of the copy has no problem.
Small combinations are tried first. Where none fits, the advice is the smallest hardware that fits, and adapters.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from rlinf_vl.config.placement import Placement, shares_slots
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.limits import MIXTURE_FAMILIES
from rlinf_vl.config.validate import validate_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.preflight.ledger import GIB, Hardware, Ledger, ledger
from rlinf_vl.preflight.model import Model

#: Sizes of cards in GB, as printed on them, that a search for hardware goes through.
CARDS = (24, 48, 80)
#: (GPUs of a machine, machines), the fewest first.
CLUSTERS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16))
BUDGET = "runner.max_tokens_per_mbs"
CPU_OFFLOAD = "actor.fsdp_config.cpu_offload"
#: What an engine's weights may take of a card. The rest is for KV cache, CUDA graphs and workspace.
ENGINE_SHARE = 0.75


class Change(NamedTuple):
    """One override."""

    key: str
    value: Any

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return f"{self.key}={str(self.value).lower()}"
        if isinstance(self.value, float):
            return f"{self.key}={self.value:g}"
        if isinstance(self.value, dict):
            return f"{self.key}={next(iter(self.value.values()))}"
        return f"{self.key}={self.value}"


LORA = (Change("actor.model.is_lora", True),)
QLORA = (*LORA, Change("actor.model.lora.quantization", "nf4"))
#: bitsandbytes can't quantize stacked experts.
NO_EXPERTS = Change("actor.model.lora.exclude_modules", [".*experts.*"])
#: Changes that leave the algorithm alone. Among combinations of one size, the first are tried first.
MEMORY_CHANGES = (
    Change("rollout.gpu_memory_utilization", "auto"),
    Change(BUDGET, None),  # the largest that fits
    Change("actor.vision_cache_gb", 1.0),
    Change("actor.enable_offload", True),
    Change("actor.fsdp_config.gradient_checkpointing", True),
    Change("actor.fsdp_config.reshard_after_forward", True),
    Change("rollout.max_running_requests", 64),
    Change("rollout.weight_sync", "object_store"),  # through host memory, bucket by bucket
    Change(CPU_OFFLOAD, True),
)


@dataclass(frozen=True)
class Fit:
    """Changes with which a config fits on some hardware, and its ledger then."""

    changes: tuple[Change, ...]
    made: Ledger

    @property
    def overrides(self) -> str:
        """The changes as a command line has them; "" without any."""
        return " ".join(map(str, self.changes))

    def __str__(self) -> str:
        peak, phase = max(gpu.peak for gpu in self.made.gpus)
        usable = self.made.hardware.usable / GIB
        return f"at most {peak / GIB:.1f} of {usable:.1f} GiB, in {phase}"


class Advisor:
    """Searches changes for one config. Models and their traces are made once for all searches."""

    def __init__(self, config: Config, model: Model) -> None:
        self.config = config
        self._models = {_model_key(config): model}
        self._path = model.path

    def smallest_change(
        self,
        hardware: Hardware,
        base: Sequence[Change] = (),
        placed: Placement | None = None,
        *,
        cpu_offload: bool | None = None,
        exact: bool = True,
    ) -> Fit | None:
        """Return the smallest combination of changes beside `base` that fits on `hardware`; None where none does.

        `actor.fsdp_config.cpu_offload` comes last whatever the size: with it the CPU takes each optimizer step.

        Args:
            placed: who sits where, as given to `ledger`.
            cpu_offload: whether only combinations with it, or without it, are tried; None: both.
            exact: find the largest budget, not just the smallest one, where the budget is changed.
        """
        if fit := self._try(base, hardware, placed):
            return fit
        started = _applied(self.config, base)
        useful = [change for change in MEMORY_CHANGES if _lowers(started, change)]
        gentle = [change for change in useful if change.key != CPU_OFFLOAD]
        offload = [change for change in useful if change.key == CPU_OFFLOAD]
        if started.actor.enable_offload:  # the two exclude each other
            offload.append(Change("actor.enable_offload", False))
        exclusive = [change for change in gentle if change.key != "actor.enable_offload"]
        searches = [] if cpu_offload else [([], gentle)]
        if offload[:1] and offload[0].key == CPU_OFFLOAD and cpu_offload is not False:
            searches.append((offload, exclusive))
        for last, others in searches:
            # Each change only lowers what is needed, so where all together are too little, so is any part.
            if self._try([*base, *others, *last], hardware, placed) is None:
                continue
            sizes = range(len(others) + 1)
            for chosen in itertools.chain(*(itertools.combinations(others, size) for size in sizes)):
                if fit := self._try([*base, *chosen, *last], hardware, placed):
                    return self._with_largest_budget(fit, hardware, placed) if exact else fit
        return None

    def smallest_hardware(self, card: int, base: Sequence[Change] = (), *, exact: bool = True) -> Fit | None:
        """Return how the config fits on the fewest cards of so many GB; None where it does on none of `CLUSTERS`.

        `actor.fsdp_config.cpu_offload` is set only where no cluster holds the config without it.
        """
        for cpu_offload, (gpus, nodes) in itertools.product((False, True), CLUSTERS):
            hardware = Hardware.named(gpus, card, nodes)
            for placement in self._placements(card, gpus * nodes):
                changes = (*base, *placement)
                if fit := self.smallest_change(hardware, changes, cpu_offload=cpu_offload, exact=exact):
                    return fit
        return None

    def adapters(self, hardware: Hardware, placed: Placement | None = None) -> Fit | None:
        """Return how LoRA, or else QLoRA, fits on `hardware`; None where neither does."""
        for base in (LORA, self.qlora):
            if not self.config.actor.model.is_lora and (fit := self.smallest_change(hardware, base, placed)):
                return fit
        return None

    @property
    def qlora(self) -> tuple[Change, ...]:
        (model, *_) = self._models.values()
        return (*QLORA, NO_EXPERTS) if model.shape.model_type in MIXTURE_FAMILIES else QLORA

    def _placements(self, card: int, slots: int) -> Iterator[tuple[Change, ...]]:
        """Yield changes of who sits where: none, and engines of several GPUs apart from the trainer.

        None is left out where one GPU can't hold an engine.
        """
        rollout = self.config.rollout
        (model, *_) = self._models.values()
        bytes_each = DTYPES[rollout.model.precision].itemsize
        share = model.weights.total * bytes_each / (ENGINE_SHARE * Hardware.named(1, card).usable)
        can_split = shares_slots(self.config.cluster.component_placement) and rollout.rollout_backend == "sglang"
        if share <= 1 or not can_split:
            yield ()
        least = next((size for size in (1, 2, 4) if size >= share), 8)
        for size in (least, 2 * least) if can_split else ():
            if 2 * size <= slots and size <= 8:
                apart = Change("cluster.component_placement", {"actor,rollout": "disaggregated"})
                yield (apart, Change("rollout.tensor_parallel_size", size)) if size > 1 else (apart,)

    def _model(self, config: Config) -> Model:
        key = _model_key(config)
        if key not in self._models:
            self._models[key] = Model(config, self._path)
        return self._models[key]

    def ledger_with(
        self, changes: Sequence[Change], hardware: Hardware, placed: Placement | None = None
    ) -> Ledger | None:
        """Return the ledger of the config with these changes; None where that is no valid config."""
        config = _applied(self.config, changes)
        try:
            validate_config(config)
            return ledger(config, hardware, self._model(config), placed)
        except (ConfigError, ValueError):  # a ValueError: adapters that this model can't have
            return None

    def _try(self, changes: Sequence[Change], hardware: Hardware, placed: Placement | None) -> Fit | None:
        """Return the fit of the config with these changes; None where it does not fit, or is no valid config."""
        made = self.ledger_with(changes, hardware, placed)
        if made is None or made.problems:
            return None
        budget = made.config.runner.max_tokens_per_mbs
        return Fit(tuple(Change(key, budget if key == BUDGET else value) for key, value in changes), made)

    def _with_largest_budget(self, fit: Fit, hardware: Hardware, placed: Placement | None) -> Fit:
        """Return the fit with the largest budget that fits, to a sixth, where it has the smallest one."""
        if all(change.key != BUDGET for change in fit.changes):
            return fit
        low, high = fit.made.config.runner.max_tokens_per_mbs, self.config.runner.max_tokens_per_mbs
        while high - low > max(512, low // 6):  # each try traces the model
            middle = (low + high) // 1024 * 512
            tried = [change._replace(value=middle) if change.key == BUDGET else change for change in fit.changes]
            if larger := self._try(tried, hardware, placed):
                low, fit = middle, larger
            else:
                high = middle
        return fit


def advise(made: Ledger, model: Model, placed: Placement | None = None, *, elsewhere: bool = True) -> list[str]:
    """Return what to do about a ledger with problems, a line each.

    Args:
        placed: who sits where, as given to `ledger`.
        elsewhere: look for other hardware and adapters, too, where no change makes it fit. That takes minutes at worst.
    """
    advisor, hardware = Advisor(made.config, model), made.hardware
    if fit := advisor.smallest_change(hardware, placed=placed):
        lines = [f"set {fit.overrides}: then {_gains(made, fit.made)}"]
        if elsewhere and any(change.key == CPU_OFFLOAD for change in fit.changes):
            lines[0] += "; the CPU then takes each optimizer step, which is slow"
            lines += _adapters(advisor, hardware, placed)
        return lines
    lines = [f"no setting makes it fit on {hardware}"]
    if not elsewhere:
        return [f"{lines[0]}; 'python -m rlinf_vl preflight' says the smallest hardware that fits"]
    found = ((card, advisor.smallest_hardware(card)) for card in CARDS)
    fits = [f"{_cards(fit.made.hardware, card)} {_how(fit)}" for card, fit in found if fit]
    if fits:
        lines.append(f"smallest that fits: {'; or '.join(fits)}")
    return lines + _adapters(advisor, hardware, placed)


def _adapters(advisor: Advisor, hardware: Hardware, placed: Placement | None) -> list[str]:
    fit = advisor.adapters(hardware, placed)
    return [f"or train adapters on what there is: {_how(fit)}"] if fit else []


def _model_key(config: Config) -> tuple[object, ...]:
    """What of a config decides on its `Model`, among the keys that are changed here."""
    model = config.actor.model
    lora = (model.lora.quantization, *model.lora.exclude_modules) if model.is_lora else ()
    return (config.actor.fsdp_config.gradient_checkpointing, model.is_lora, *lora)


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _applied(config: Config, changes: Iterable[Change]) -> Config:
    """Return a copy with the changes; a budget without a value is the smallest."""
    changed = copy.deepcopy(config)
    for key, value in changes:
        *sections, leaf = key.split(".")
        if key == BUDGET and value is None:
            value = min_budget(config)
        setattr(reduce(getattr, sections, changed), leaf, copy.deepcopy(value))
    return changed


def min_budget(config: Config) -> int:
    """The smallest `runner.max_tokens_per_mbs` that holds the longest trajectory, in steps of 512."""
    alike = 1 if config.runner.enable_dynamic_batch_size else config.actor.micro_batch_size
    return -(-alike * config.runner.seq_length // 512) * 512


def _lowers(config: Config, change: Change) -> bool:
    """Return whether the change is one, and takes memory away."""
    now = _value(config, change.key)
    if change.key == BUDGET:
        return now > min_budget(config)
    if isinstance(change.value, bool | str):
        return now != change.value
    return now > change.value


def _gains(before: Ledger, after: Ledger) -> str:
    """Say what each phase of a problem takes then, and the fullest phase."""
    usable, gains = before.hardware.usable, []
    for old, new in zip(before.gpus, after.gpus, strict=True):
        for phase, parts in old.phases.items():
            was, now = sum(parts.values()), sum(new.phases[phase].values())
            if any(text.startswith(f"{phase} needs") and old.role in text for text in before.problems):
                gains.append(f"{phase} takes {now / GIB:.1f} instead of {was / GIB:.1f} GiB")
    peak, phase = max(gpu.peak for gpu in after.gpus)
    return ", ".join([*gains, f"at most {peak / GIB:.1f} of {usable / GIB:.1f} GiB in {phase}"])


def _cards(hardware: Hardware, card: int) -> str:
    machines = f"{hardware.nodes} × " if hardware.nodes > 1 else ""
    return f"{machines}{hardware.gpus} × {card} GB"


def _how(fit: Fit) -> str:
    return f"with {fit.overrides} ({fit})" if fit.changes else f"as it is ({fit})"
