"""The step in plain code: transformers' own forward of one unpacked sequence at a time, formulas
written out, autograd and AdamW by hand. Everything else is compared with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from rlinf_vl.config.schema import AlgorithmConfig, Config
from rlinf_vl.models.expert_modules import routers
from rlinf_vl.models.loading import part_of
from rlinf_vl.models.mixture import ROUTES
from rlinf_vl.observe.replay_file import PlannedMiniBatch, RecordedStep, TrajectoryNumber
from rlinf_vl.tools.verify.prove.reference import forward_inputs
from rlinf_vl.tools.verify.replay.hooks import Hooks, as_array, whole
from rlinf_vl.tools.verify.replay.quantities import Owner, Quantity, Trace
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.types import ImageRef, TokenSequence

#: Bits behind the leading one of a number.
DIGITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def left_out(config: Config) -> list[str]:
    """Return the settings whose formulas the plain update does not have; with any, replay compares
    the step up to the logprobs."""
    algorithm, defaults = config.algorithm, AlgorithmConfig()
    checked = {
        "algorithm.loss_type": (algorithm.loss_type, "actor"),
        "algorithm.adv_type": (algorithm.adv_type, "grpo"),
        "algorithm.credit": (algorithm.credit, "trajectory"),
        "algorithm.state_advantage_weight": (algorithm.state_advantage_weight, 0.0),
        "algorithm.reward_normalization": (algorithm.reward_normalization, "sum"),
        "algorithm.old_policy": (algorithm.old_policy, "start"),
        "algorithm.rejection.level": (algorithm.rejection.level, None),
        "algorithm.rejection.veto": (algorithm.rejection.veto, None),
        "algorithm.overlong.buffer": (algorithm.overlong.buffer, 0),
        "algorithm.kl_beta": (algorithm.kl_beta, 0.0),
        "algorithm.papo.weight": (algorithm.papo.weight, 0.0),
        "algorithm.papo.entropy_weight": (algorithm.papo.entropy_weight, 0.0),
        "algorithm.distillation": (algorithm.distillation, defaults.distillation),
        "actor.model.is_lora": (config.actor.model.is_lora, False),
        "actor.model.router_aux_loss_coef": (config.actor.model.router_aux_loss_coef, 0.0),
        "data.messages_key": (config.data.messages_key, None),
    }
    return [
        name if name == "algorithm.distillation" else f"{name}: {value}"
        for name, (value, supported) in checked.items()
        if value != supported
    ]


@dataclass
class PlainStep:
    """Computes a recorded step in one dtype.

    Attributes:
        nudge: seed of random errors of half a unit in the last place of every weight and pixel;
            None: no errors.
        routes: experts to use in place of the router's own, by layer and sequence. Two experts
            that are equally likely but for rounding are no difference worth naming, and the
            states behind them are.
    """

    subject: Subject
    step: RecordedStep
    config: Config
    dtype: torch.dtype
    nudge: int | None = None
    routes: Mapping[tuple[int, Owner], np.ndarray] = field(default_factory=dict)
    with_update: bool = True

    def run(self) -> Trace:
        """Return the trace of the forward and, `with_update`, of the first optimizer step."""
        torch.manual_seed(0)
        trace = self._trace = Trace(banned=self.subject.banned)
        self.model = model = self.subject.plain_model(self.dtype)
        self.generator = torch.Generator().manual_seed(self.nudge or 0)
        if self.nudge is not None:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(self._nudged(weight, weight.dtype))
        trained = set(self._trained_names(model))
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in trained)
        hooks = Hooks(model, self.subject.family, trace)
        self._force_routes(model)
        self.loss = 0.0
        try:
            for m, mini in enumerate(self.step.minibatches):
                for number in mini.trajectories:
                    if not self.with_update or m:
                        with torch.no_grad():
                            logprobs, _ = self._logprobs(number, hooks, trace)
                        trace.put(Quantity.of("old logprobs"), (*number, 0), as_array(logprobs))
                    else:
                        self._loss_of(number, mini, hooks, trace)
            if self.with_update and self.step.minibatches:
                trace.put(Quantity.of("loss"), "", np.array([self.loss]))
                self._gradients(model, trained, trace)
        finally:
            hooks.remove()
        for name in trained if self.with_update else ():
            trace.put(Quantity.of("trained weights"), name, np.ones(1))
        return trace

    def _nudged(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a value with random errors of about half a unit in its last place."""
        noise = torch.randn(value.shape, generator=self.generator)
        return (value.float() * (1 + 2.0 ** -(1 + DIGITS[dtype]) * noise)).to(value.dtype)

    def _trained_names(self, model: nn.Module) -> list[str]:
        """Return the names of the weights that the config trains."""
        settings, family = self.config.actor.model, self.subject.family
        frozen = settings.frozen_parts
        frozen_routers = tuple(f"{path}." for path in routers(model) if settings.freeze_router)
        names = []
        for name, _ in model.named_parameters():
            if part_of(name, family) not in frozen and not name.startswith(frozen_routers):
                names.append(name)
        return names

    # --- forward ------------------------------------------------------------------------------------

    def _pixels(self, image: ImageRef) -> np.ndarray:
        pixels = self.subject.pixels(image)
        if self.nudge is None:
            return pixels
        return self._nudged(torch.from_numpy(pixels), self.dtype).float().numpy()

    def _logprobs(
        self, number: TrajectoryNumber, hooks: Hooks, trace: Trace
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs and entropies of a trajectory's sampled tokens, float32 [R]."""
        g, i = number
        logprobs, entropies = [], []
        for k, sequence in enumerate(self.step.groups[g].trajectories[i].sequences):
            sampled = np.flatnonzero(sequence.loss_mask)
            owner = (g, i, k)
            logits = self._logits(owner, sequence, hooks)
            trace.put(Quantity.of("logits"), owner, as_array(logits[sampled - 1]))
            # The sampler's distribution: tempered, without the banned ids.
            logits = logits.float() / self.config.algorithm.sampling_params.temperature
            logits = logits.masked_fill(torch.from_numpy(self.subject.banned), -torch.inf)
            log_p = logits.log_softmax(-1)[sampled - 1]
            targets = torch.from_numpy(sequence.ids[sampled].astype(np.int64))
            chosen = log_p.gather(1, targets[:, None])[:, 0]
            trace.targets[owner] = targets.numpy()
            for name in ("logprobs", "rollout logprobs"):
                trace.put(Quantity.of(name), owner, as_array(chosen))
            logprobs.append(chosen)
            entropies.append(-(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1))
        return torch.cat(logprobs), torch.cat(entropies)

    def _logits(self, owner: Owner, sequence: TokenSequence, hooks: Hooks) -> torch.Tensor:
        """Return the logits of one sequence, [T, V]; the hooks record its activations."""
        tokens = self.subject.image_tokens

        def clip_seconds(clip: ImageRef) -> float:
            return (*tokens.with_times([clip]).patch_seconds, 0.0)[0]

        inputs = forward_inputs(
            self.model, self.subject.family, tokens, self._pixels, sequence, clip_seconds
        )
        hooks.rows = whole(owner)
        self._owner = owner
        self._engine_routes = self._recorded_routes(sequence)
        try:
            return self.model(**inputs, use_cache=False).logits[0]
        finally:
            hooks.rows = None

    def _recorded_routes(self, sequence: TokenSequence) -> np.ndarray | None:
        """Return the engine's experts of a sequence if the trainer replays them."""
        if self.config.actor.routing_replay != "replay":
            return None
        return sequence.columns.get(ROUTES)

    def _force_routes(self, model: nn.Module) -> None:
        """Put other experts in the place of the router's own: those that the trainer replays, and
        those of `routes`."""
        mixture = self.subject.family.mixture(self.subject.config)
        if mixture is None:
            return
        blocks = list(model.get_submodule(self.subject.family.text_blocks).children())
        for number, layer in enumerate(mixture.layers):

            def chosen(
                module: nn.Module, args: Any, output: Any, number: int = number, layer: int = layer
            ) -> Any:
                return self._routed(number, layer, *output)

            blocks[layer].get_submodule("mlp.gate").register_forward_hook(chosen)

    def _routed(
        self,
        number: int,
        layer: int,
        logits: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output of a router with the experts that are to be used.

        The trace gets, for each token, by how much the least likely of them is less likely than the
        last one of the router's own: 0 where it would have chosen them.
        """
        used_experts = experts.clone()
        forced = self.routes.get((layer, self._owner))
        if forced is not None:  # the engine has none of the last token
            used_experts[: len(forced)] = torch.from_numpy(forced.astype(np.int64))
        probs = logits.softmax(-1, dtype=torch.float32)
        deficit = probs.gather(1, experts).amin(-1) - probs.gather(1, used_experts).amin(-1)
        engine = self._engine_routes
        if engine is not None:
            k = experts.shape[1]
            engine_experts = torch.from_numpy(
                engine.astype(np.int64)[:, number * k : (number + 1) * k]
            )
            reported = torch.from_numpy(engine.any(1))
            differs = (engine_experts.sort(-1).values != used_experts.sort(-1).values).any(-1)
            # What the engine reported is to be used, whatever this router thinks of it.
            deficit = torch.where(reported, differs.float(), deficit)
            used_experts = torch.where(reported[:, None], engine_experts, used_experts)
        quantity = Quantity.of("decoder layer", layer, "experts")
        self._trace.put(quantity, self._owner, as_array(deficit))
        chosen = probs.gather(1, used_experts)
        new_weights = chosen / chosen.sum(-1, keepdim=True)
        return logits, new_weights.to(weights.dtype), used_experts

    # --- loss ---------------------------------------------------------------------------------------

    def _loss_of(
        self, number: TrajectoryNumber, mini: PlannedMiniBatch, hooks: Hooks, trace: Trace
    ) -> None:
        """Add the gradient of one trajectory's part of the mini-batch's loss."""
        algorithm = self.config.algorithm
        g, i = number
        group = self.step.groups[g]
        trajectory = group.trajectories[i]
        logprobs, entropy = self._logprobs(number, hooks, trace)
        old = logprobs.detach()
        advantages = torch.full_like(old, self.advantage(number))
        owner = (g, i, 0)
        trace.put(Quantity.of("old logprobs"), owner, as_array(old))
        trace.put(Quantity.of("advantages"), owner, as_array(advantages))
        trace.put(Quantity.of("loss mask"), owner, np.ones(len(old)))
        ratio = (logprobs - old).exp()
        low, high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
        assert low is not None and high is not None
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
        if algorithm.clip_ratio_c is not None:
            capped = torch.minimum(loss, -advantages * algorithm.clip_ratio_c)
            loss = torch.where(advantages < 0, capped, loss)
        if algorithm.importance_sampling_fix:
            weights = self._weights(old, trajectory.sequences, trajectory.corrupted)
            trace.put(Quantity.of("correction weights"), owner, as_array(weights))
            loss = loss * weights
        trace.put(Quantity.of("token loss"), owner, as_array(loss))
        loss = loss - algorithm.entropy_bonus * entropy
        mode, tokens = algorithm.loss_agg_func, len(loss)
        total = loss.sum()
        if mode == "seq-mean-token-mean":
            total = total / tokens
        part = total / self._denominator(mini)
        part.backward()
        self.loss += float(part.detach())

    def _weights(
        self, old: torch.Tensor, sequences: Sequence[TokenSequence], corrupted: bool
    ) -> torch.Tensor:
        """Return min(exp(old - rollout), clip) of each token, at the config's level."""
        algorithm = self.config.algorithm
        if corrupted:
            return torch.ones_like(old)
        columns = [s.logprobs[s.loss_mask] for s in sequences if s.logprobs is not None]
        gap = old - torch.from_numpy(np.concatenate(columns))
        if algorithm.importance_sampling_level == "sequence":
            gap = gap.sum().expand_as(gap)
        elif algorithm.importance_sampling_level == "geometric":
            gap = gap.mean().expand_as(gap)
        return gap.exp().clamp(max=algorithm.importance_sampling_clip)

    def _denominator(self, mini: PlannedMiniBatch) -> float:
        """Return the number of tokens or sequences that the loss is divided by.

        Of a part of a step, the recorded one: its counts are those of the whole mini-batch.
        """
        if not self.step.is_whole:
            return mini.denominator
        trajectories = [self.step.groups[g].trajectories[i] for g, i in mini.trajectories]
        mode = self.config.algorithm.loss_agg_func
        if mode == "token-mean":
            return max(1, sum(int(s.loss_mask.sum()) for t in trajectories for s in t.sequences))
        longest = self.config.algorithm.sampling_params.max_new_tokens or 1
        constant = longest if mode == "seq-mean-token-sum-norm" else 1
        return max(1, len(trajectories)) * constant

    def advantage(self, number: TrajectoryNumber) -> float:
        """Return the advantage of a trajectory among those of its group (GRPO), with the sample
        standard deviation; the recorded one where the group is not whole."""
        g, i = number
        recorded = self.step.advantages[g][i]
        if not self.step.group_is_whole(g):
            return float(np.mean(recorded[0])) if recorded else 0.0
        compared = [
            t.reward
            for t in self.step.groups[g].trajectories
            if t.error is None and any(s.loss_mask.any() for s in t.sequences)
        ]
        mean = math.fsum(compared) / len(compared)
        value = self.step.groups[g].trajectories[i].reward - mean
        if len(set(compared)) < 2:
            return 0.0
        if not self.config.algorithm.normalize_advantages:
            return value
        squares = math.fsum((reward - mean) ** 2 for reward in compared)
        return value / (math.sqrt(squares / (len(compared) - 1)) + 1e-6)

    def _gradients(self, model: nn.Module, trained: set[str], trace: Trace) -> None:
        """Record the gradient of each weight and the norm of all."""
        squares = 0.0
        for name, weight in model.named_parameters():
            if name in trained and weight.grad is not None:
                trace.put(Quantity.of("gradient"), name, as_array(weight.grad))
                squares += float(weight.grad.double().square().sum())
        trace.put(Quantity.of("gradient norm"), "", np.array([math.sqrt(squares)]))


def plain_adamw(
    name: str, weight: np.ndarray, gradient: np.ndarray, lr: float, config: Config
) -> np.ndarray:
    """Return a weight after AdamW's first step (Loshchilov & Hutter 2019), float64; vectors have no
    decay."""
    optim = config.actor.optim
    value, slope = weight.astype(np.float64), gradient.astype(np.float64)
    decay = optim.weight_decay if weight.ndim > 1 else 0.0
    # With the moments' bias corrected, the first step has the gradient itself and its magnitude.
    return value * (1 - lr * decay) - lr * slope / (np.abs(slope) + optim.adam_eps)
