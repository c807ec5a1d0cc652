"""The paths that a family takes through this project, each against transformers' own forward.

A proof returns figures, which must stay within a limit. They are the largest differences: of a
logprob in nats, and of an entry of a gradient, relative to its tensor's largest where that is above
1.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer

from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.expert_modules import routers, stacked_weights
from rlinf_vl.models.loading import freeze
from rlinf_vl.models.lora import AdapterError, is_adapter, train_parts
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.recompute import checkpoint_blocks
from rlinf_vl.models.saving import save_model
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.packing.collator import Collator
from rlinf_vl.packing.collator import Member as PackedTrajectory
from rlinf_vl.tools.verify.prove.member import Member
from rlinf_vl.tools.verify.prove.problems import (
    CLIP_SIZES,
    SIZES,
    answered,
    clip_groups,
    flat_groups,
    random_request,
    tree_groups,
)
from rlinf_vl.tools.verify.prove.prompts import prompt_figures
from rlinf_vl.tools.verify.prove.ranks import step_on_ranks
from rlinf_vl.tools.verify.prove.reference import (
    all_logprobs,
    logprobs_of,
    packed_trajectories,
    pixels_of,
    weighted_sum,
)
from rlinf_vl.tools.verify.prove.sglang import reasons_against, sglang_figures
from rlinf_vl.tools.verify.prove.words import word_figures
from rlinf_vl.types import SamplingParams

LIMIT = 1e-5
#: A recurrent net's states differ with the order of sums over a whole sequence. transformers' and
#: our gradients are up to 6e-5 from those of float64 weights, to either side, by processor: 1.04e-4
#: apart on one with AVX-512.
RECURRENT_LIMIT = 2e-4
LORA = LoraConfig(rank=3, alpha=6.0, target_modules=["all-linear"])


class Refused(Exception):
    """A path that the family, or what is installed here, does not have; the message says why."""


#: The largest differences that a proof has measured.
Figures = tuple[float, ...]
Gradients = dict[str, torch.Tensor | None]


@dataclass
class Proofs:
    """The proofs of one member of a family.

    Attributes:
        member: the member.
        tokenizer_folder: the folder of the checkpoint's tokenizer, None for a bare model type.
        paths: the proofs by the name of their path, cheap ones first.
    """

    member: Member
    tokenizer_folder: Path | None = None
    paths: dict[str, Callable[[], Figures]] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = {
            "prompts": self.prompts,
            "words": self.words,
            "positions": self.positions,
            "packed": self.packed,
            "shared": self.shared,
            "tree": self.tree,
            "cached features": self.cached_features,
            "checkpointing": self.checkpointing,
            "lora": self.lora,
            "video": self.video,
            "torch engine": self.torch_engine,
            "export": self.export,
            "sglang": self.sglang,
            "two ranks": self.two_ranks,
            "context parallel": self.context_parallel,
        }

    @property
    def limit(self) -> float:
        """The largest difference that proves a path."""
        recurrent = self.member.family.decode_state(self.member.config).row_shapes
        return RECURRENT_LIMIT if recurrent else LIMIT

    # --- inputs -----------------------------------------------------------------------------------

    def prompts(self) -> Figures:
        """Compare ids, placeholders and pixels of conversations with those of its processor."""
        return prompt_figures(self.member.family, self._template_folder())

    def words(self) -> Figures:
        """Read random calls back from what the chat template writes, and extend their ids."""
        try:
            return word_figures(self.member.family, self._template_folder())
        except LookupError as error:
            raise Refused(str(error)) from error

    def _template_folder(self) -> Path:
        """Return the folder of a tokenizer with a chat template. Raises Refused: there is none."""
        if self.tokenizer_folder is None:
            raise Refused("no tokenizer in a model type; give a folder")
        if AutoTokenizer.from_pretrained(self.tokenizer_folder).chat_template is None:
            raise Refused("the tokenizer has no chat template")
        return self.tokenizer_folder

    def positions(self) -> Figures:
        """Compare positions of several pictures of odd sizes with transformers'."""
        model, differences = self.member.model(), []
        owner: Any = next((m for m in model.modules() if hasattr(m, "get_rope_index")), None)
        rng = np.random.default_rng(3)
        for sizes in (SIZES, SIZES[::-1], SIZES[:1] * 2, ()):
            request = random_request(self.member, rng, sizes)
            ids, grids = request.ids.astype(np.int64), request.image_grids
            positions = self.member.family.positions(ids, grids, self.member.image_tokens)
            expected = np.tile(np.arange(len(ids)), (4, 1))
            if owner is not None:
                row = torch.from_numpy(ids)[None]
                of_grids, _ = owner.get_rope_index(
                    row,
                    mm_token_type_ids=(row == self.member.image_tokens.id).int(),
                    image_grid_thw=torch.from_numpy(grids) if len(grids) else None,
                )
                expected[1:] = of_grids[:, 0].numpy()
            differences.append(float(np.abs(positions - expected).max()))
        return (_largest(differences),)

    # --- packed rows ------------------------------------------------------------------------------

    def packed(self) -> Figures:
        """Compare sequences side by side in one row: logprobs, and gradients of all weights."""
        return self._row_figures(self._flat, *self._flat_reference, share_prompts=False)

    def shared(self) -> Figures:
        """Compare the same with each prompt once in the row, its answers behind it."""
        return self._row_figures(self._flat, *self._flat_reference)

    def tree(self) -> Figures:
        """Compare trajectories of two sequences that share a part of their histories."""
        packed = packed_trajectories(tree_groups(self.member))
        return self._row_figures(packed, *self._reference(packed))

    def checkpointing(self) -> Figures:
        """Compare shared prompts with blocks that are computed again in the backward."""
        policy = self.member.policy().train()
        checkpoint_blocks(policy.model, self.member.family, "full")
        return self._row_figures(self._flat, *self._flat_reference, policy=policy)

    def cached_features(self) -> Figures:
        """Compare a frozen tower's features from the cache, encoded in another order."""
        self._need_images()
        policy = self.member.policy().train()
        freeze(policy.model, self.member.family)
        images = {
            image.hash: (image, grid)
            for packed in self._flat
            for sequence in packed.trajectory.sequences
            for image, grid in sequence.images
        }
        cache = VisionCache(2**30, "cpu")
        cache.pin(images)
        for name, (image, grid) in reversed(images.items()):
            grids = np.array([grid])
            features = policy.encode(pixels_of(self.member, image), grids)
            cache.put([name], features, self.member.image_tokens(grids).tolist())
        batch = self._collator(pixels=False)(self._flat, run_vision=False)
        logprobs, _ = policy(batch, cache.get(batch.images))
        weighted_sum(logprobs).backward()
        expected, gradients = self._flat_reference
        trained = {
            name: gradients[name]
            for name, weight in policy.model.named_parameters()
            if weight.requires_grad
        }
        return _furthest(logprobs, expected), _gradients_apart(policy.model, trained)

    def lora(self) -> Figures:
        """Compare adapters on all linear modules and experts with peft's in transformers."""
        model = _with_adapters(self.member, self._peft_model())
        expected = all_logprobs(self.member, model, self._flat)
        weighted_sum(expected).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if is_adapter(name)}
        policy = self.member.policy().train()
        try:
            train_parts(policy.model, self.member.family, (), LORA)
        except AdapterError as error:
            raise Refused(str(error)) from error
        _with_adapters(self.member, policy.model)
        return self._row_figures(self._flat, expected.detach(), gradients, policy=policy)

    # --- engine and export ------------------------------------------------------------------------

    def torch_engine(self) -> Figures:
        """Compare logprobs of what the torch engine samples, with several pictures and none."""
        return (self._sampled_figure(SIZES[:1], (), SIZES[1:3]),)

    def video(self) -> Figures:
        """Compare clips of 2 to 9 frames beside pictures: packed rows, and the torch engine."""
        if self.member.videos is None:
            raise Refused("no video")
        packed = packed_trajectories(clip_groups(self.member))
        row_figures = self._row_figures(packed, *self._reference(packed))
        return *row_figures, self._sampled_figure(CLIP_SIZES, (SIZES[0], *CLIP_SIZES[:2]))

    def _sampled_figure(self, *sizes_of_prompts: Sequence[Sequence[float]]) -> float:
        """Return how far logprobs of the torch engine are from transformers'.

        Args:
            sizes_of_prompts: those of `random_request` for each prompt.
        """
        rng = np.random.default_rng(2)
        sampling = SamplingParams(max_new_tokens=12)
        requests = [
            random_request(self.member, rng, sizes, sampling, (1, 2, 3))
            for sizes in sizes_of_prompts
        ]
        policy, model = self.member.policy(), self.member.model()
        engine = TorchEngine(
            policy.model,
            self.member.family,
            banned=self.member.banned,
            pixels=lambda image: pixels_of(self.member, image),
            image_tokens=self.member.image_tokens,
            max_running=64,
        )
        try:
            completions = engine.generate(requests)
        finally:
            engine.close()
        differences = []
        for request, completion in zip(requests, completions, strict=True):
            for trajectory in answered(request, completion.samples, "sampled").trajectories:
                (sequence,) = trajectory.sequences
                assert sequence.logprobs is not None
                with torch.no_grad():
                    expected = logprobs_of(self.member, model, sequence)
                sampled = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
                differences.append(_furthest(sampled, expected))
        return _largest(differences)

    def export(self) -> Figures:
        """Compare what transformers loads from an export, with no weight missing or left over."""
        with tempfile.TemporaryDirectory() as folder:
            save_model(self.member.model(), self.member.family, Path(folder))
            model, info = self.member.family.model_class.from_pretrained(
                folder, output_loading_info=True, dtype=torch.float32
            )
        if unloaded := {kind: names for kind, names in info.items() if names}:
            raise AssertionError(f"transformers loads an export with {unloaded}")
        with torch.no_grad():
            logprobs = all_logprobs(self.member, model, self._flat)
        return (_furthest(logprobs, self._flat_reference[0]),)

    def sglang(self) -> Figures:
        """Compare logprobs of what SGLang samples, before and after a sync of other weights."""
        if reasons := reasons_against(self.member):
            raise Refused(reasons)
        return sglang_figures(self.member)

    # --- ranks ------------------------------------------------------------------------------------

    def two_ranks(self) -> Figures:
        """Compare a training step on two FSDP2 ranks with one: loss, gradient norm, weights."""
        return self._step_figures(ranks=2, context=1)

    def context_parallel(self) -> Figures:
        """Compare a training step of two ranks that share each row's tokens with one rank."""
        return self._step_figures(ranks=2, context=2)

    @cached_property
    def _one_rank(self) -> Any:
        return step_on_ranks(self.member, 1, 1)

    def _step_figures(self, ranks: int, context: int) -> Figures:
        one, several = self._one_rank, step_on_ranks(self.member, ranks, context)
        weights_apart = [
            float(np.abs(several.weights[name] - weight).max())
            for name, weight in one.weights.items()
        ]
        return (
            abs(several.loss - one.loss),
            abs(several.gradient_norm - one.gradient_norm) / one.gradient_norm,
            _largest(weights_apart),
        )

    # --- parts ------------------------------------------------------------------------------------

    @cached_property
    def _flat(self) -> list[PackedTrajectory]:
        return packed_trajectories(flat_groups(self.member))

    @cached_property
    def _flat_reference(self) -> tuple[torch.Tensor, Gradients]:
        return self._reference(self._flat)

    def _reference(self, packed: Sequence[PackedTrajectory]) -> tuple[torch.Tensor, Gradients]:
        """Return transformers' logprobs of trajectories, and the gradients of a sum of them."""
        model = self.member.model().train()
        logprobs = all_logprobs(self.member, model, packed)
        weighted_sum(logprobs).backward()
        return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}

    def _row_figures(
        self,
        packed: Sequence[PackedTrajectory],
        expected: torch.Tensor,
        gradients: Gradients,
        *,
        share_prompts: bool = True,
        policy: PolicyModel | None = None,
    ) -> Figures:
        """Return how far one packed row is from the reference, in logprobs and gradients."""
        policy = policy or self.member.policy().train()
        batch = self._collator(share_prompts)(packed, run_vision=self.member.images is not None)
        logprobs, _ = policy(batch)
        weighted_sum(logprobs).backward()
        return _furthest(logprobs, expected), _gradients_apart(policy.model, gradients)

    def _collator(self, share_prompts: bool = True, *, pixels: bool = True) -> Collator:
        return Collator(
            self.member.family,
            self.member.image_tokens,
            (lambda image: pixels_of(self.member, image)) if pixels else None,
            pad_id=0,
            share_prompts=share_prompts,
        )

    def _peft_model(self) -> nn.Module:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        model = self.member.model().train()
        in_routers = {module for router in routers(model).values() for module in router.modules()}
        config = PeftConfig(
            r=LORA.rank,
            lora_alpha=LORA.alpha,  # pyright: ignore[reportArgumentType]
            target_modules="all-linear",
            exclude_modules=[
                name
                for name, module in model.named_modules()
                if module in in_routers and isinstance(module, nn.Linear)
            ],
            target_parameters=stacked_weights(model) or None,
        )
        return inject_adapter_in_model(config, model)

    def _need_images(self) -> None:
        if self.member.images is None:
            raise Refused("no vision tower")


def _with_adapters(member: Member, model: Any) -> Any:
    """Give the adapters of a model large random values, the same in every model of a member."""
    torch.manual_seed(member.seed + 5)
    for name, weight in model.named_parameters():
        if is_adapter(name):
            # What they add is half as large as what the weights give.
            weight.data = 0.5 * weight.shape[-1] ** -0.5 * torch.randn(weight.shape)
    return model


def _largest(differences: list[float]) -> float:
    """Return the largest number, and NaN where one is NaN, which `max` may pass over."""
    return float(np.max(differences))


def _furthest(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values.detach() - expected).abs().max())


def _gradients_apart(model: nn.Module, expected: Gradients) -> float:
    """Return the largest difference of the gradients of the weights in `expected`."""
    weights, differences = dict(model.named_parameters()), [0.0]
    for name, gradient in expected.items():
        measured = weights[name].grad
        if (measured is None) != (gradient is None):
            raise AssertionError(f"{name} has {'no' if measured is None else 'a'} gradient")
        if measured is not None and gradient is not None:
            scale = max(1.0, float(gradient.abs().max()))
            differences.append(_furthest(measured, gradient) / scale)
    return _largest(differences)
