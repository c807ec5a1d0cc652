"""A packed row through a vision-language model, from images to logprobs.

Images become features, features go into the embeddings, then follow the text layers and the logprob
head. The trainer and the torch engine's prefill share `hidden_states`, so both feed a prompt in the
same manner.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlinf_vl.models.attention import AttentionContext, SegmentAttention
from rlinf_vl.models.context import ContextAttention, ContextRanks
from rlinf_vl.models.family import Family, VisionFeatures
from rlinf_vl.models.loading import output_weight, part_of
from rlinf_vl.models.logprobs import likeliest, token_logprobs
from rlinf_vl.models.mixture import ROUTES, ExpertLoad, Routing
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.models.shards import Shards
from rlinf_vl.models.transfer import on_device
from rlinf_vl.types import MicroBatch


def encode_images(
    model: PreTrainedModel,
    family: Family,
    pixel_values: np.ndarray | torch.Tensor,
    grids: np.ndarray,
    device: torch.device | str,
) -> VisionFeatures:
    """Run the vision tower on the patches, float32 [P, d], of images with `grids`, int64 [n, 3].

    The result is differentiable if the tower is trained.
    """
    patches = on_device(pixel_values, device)
    with torch.set_grad_enabled(trains_images(model, family) and torch.is_grad_enabled()):
        return family.encode_images(
            image_encoder(model, family), patches, grids, output_weight(model).dtype
        )


def image_encoder(model: nn.Module, family: Family) -> nn.Module:
    """Return the module that `Family.encode_images` gets."""
    return model.get_submodule(family.image_encoder or family.vision_tower or "")


def is_trained(module: nn.Module) -> bool:
    """Return whether any parameter of the module takes gradients."""
    return any(p.requires_grad for p in module.parameters())


def trains_images(model: nn.Module, family: Family) -> bool:
    """Return whether any parameter of vision tower and projector takes gradients."""
    paths = (family.vision_tower or "", *family.projector)
    return any(is_trained(model.get_submodule(path)) for path in paths)


def hidden_states(
    model: nn.Module,
    family: Family,
    ids: torch.Tensor,
    positions: torch.Tensor,
    context: AttentionContext,
    features: VisionFeatures | None = None,
    image_positions: torch.Tensor | None = None,
    routing: Routing | None = None,
) -> torch.Tensor:
    """Return the last hidden states [T, H] of a packed row.

    Args:
        ids: [T].
        positions: [4, T].
        context: attention and delta nets of this row.
        features: the features of the row's image tokens. Without `image_positions` they only keep a
            trained tower in the graph.
        image_positions: int64 [N], where the features go.
        routing: chooses the experts in mixtures.
    """
    text_model: Any = model.get_submodule(family.text_model)
    embeds = text_model.get_input_embeddings()(ids)
    deepstack = ()
    if image_positions is not None and not len(image_positions):
        image_positions = None
    if features is not None and image_positions is not None:
        embeds = embeds.index_put((image_positions,), features.tokens.to(embeds.dtype))
        deepstack = features.deepstack
    elif features is not None and features.tokens.requires_grad:
        # A zero that depends on the tower: its backward runs, and its collectives with it.
        embeds = embeds + 0.0 * (
            features.tokens.sum() + sum(layer.sum() for layer in features.deepstack)
        )
    routing_kwargs: dict[str, Any] = {} if routing is None else {"routing": routing}
    return family.text_forward(
        text_model,
        embeds.unsqueeze(0),
        positions.unsqueeze(1),
        image_positions,
        deepstack,
        context=context,
        **routing_kwargs,
    )[0]


@dataclass(slots=True)
class Candidates:
    """Tokens beside the sampled ones whose logprobs several models return.

    The first model that runs sets `ids` to its `k` likeliest tokens; the others use these.
    """

    k: int
    ids: torch.Tensor | None = None  # int64 [R, K]; K is k, or the number of tokens if less


class PolicyModel(nn.Module):
    """A transformers model that returns per-token logprobs and entropies of a `MicroBatch`.

    FSDP wraps this module as its root, so the output embedding is unsharded while the head runs.
    """

    banned: torch.Tensor  # int64 [B]

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        banned: np.ndarray,
        *,
        temperature: float,
        chunk: int | None = None,
    ) -> None:
        """Wrap a transformers model.

        Args:
            banned: bool [V], ids that the sampler never draws.
            temperature: the sampler's temperature.
            chunk: positions per chunk of the head.
        """
        super().__init__()
        self.model = model
        self.family = family
        self.temperature = temperature
        self.chunk = chunk
        #: The ranks that share each row; a batch is then one rank's part of a row.
        self.context_ranks: ContextRanks | None = None
        #: Weights that `models.shards` has read, until the model is sharded.
        self.shards: Shards = {}
        self.replay = False  # use the engine's experts, where it reported them
        self.mixture = family.mixture(model.config)
        self.register_buffer("banned", torch.from_numpy(np.flatnonzero(banned)), persistent=False)

    def encode(self, pixel_values: np.ndarray, grids: np.ndarray) -> VisionFeatures:
        """Return the features of some images, for `forward`."""
        return encode_images(self.model, self.family, pixel_values, grids, self.banned.device)

    def forward(
        self,
        batch: MicroBatch,
        features: VisionFeatures | None = None,
        load: ExpertLoad | None = None,
        balance: torch.Tensor | None = None,
        candidates: Candidates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (logprobs, entropy), float32 [R], of the row's response tokens.

        A pass without gradients gives no entropy. Ranks that share the row all get the logprobs and
        entropies of the whole row, and each the gradient of its own tokens.

        Args:
            features: the features of `batch.images`, in order, in place of its pixels.
            load: counts the experts that tokens go to.
            balance: see `Routing`.
            candidates: further tokens; logprobs are then [R, 1 + K], the sampled token's first.
        """
        device = self.banned.device
        ids, positions, predict, targets, image_positions, image_features = (
            on_device(getattr(batch, name), device)
            for name in (
                "ids",
                "positions",
                "predict",
                "targets",
                "image_positions",
                "image_features",
            )
        )
        if features is None:
            features = self._encoded(batch)
        if features is not None and len(image_features):
            features = features.select(image_features)
        weight = output_weight(self.model)
        context: AttentionContext = SegmentAttention(
            batch.cu_seqlens,
            batch.prefix,
            device=device,
            dtype=weight.dtype,
            image_runs=batch.image_runs if self.family.images_see_themselves else None,
        )
        if self.context_ranks is not None:
            context = ContextAttention(context, self.context_ranks)
        routing = (
            None if self.mixture is None else self._routing(self.mixture, batch, load, balance)
        )
        hidden = hidden_states(
            self.model, self.family, ids, positions, context, features, image_positions, routing
        )
        # Backward computes layers again, and must not count their tokens a second time.
        if routing is not None:
            routing.load = None
        # The head is the costly part: it runs only where a response token is predicted.
        hidden = hidden.index_select(0, predict)
        head: Any = {"temperature": self.temperature, "banned": self.banned, "chunk": self.chunk}
        if candidates is not None:
            if candidates.ids is None:
                candidates.ids = likeliest(hidden, weight, candidates.k, **head)
            # The sampled token comes first, and is there even if it is no candidate.
            targets = torch.cat([targets[:, None], candidates.ids], dim=1)
        logprobs, entropy = token_logprobs(
            hidden, weight, targets, with_entropy=torch.is_grad_enabled(), **head
        )
        if self.context_ranks is None or batch.part is None:
            return logprobs, entropy
        sampled_rows = on_device(batch.part.sampled, device)
        return _of_whole_row(
            logprobs, entropy, self.context_ranks, sampled_rows, len(batch.trajectories)
        )

    def _encoded(self, batch: MicroBatch) -> VisionFeatures | None:
        """Return the features of the batch's images, or of a blank one; None: no tower runs."""
        if not self.family.vision_tower:
            return None
        if not (batch.run_vision or self._learns_in_tower_alone()):
            return None
        pixel_values, grids = batch.pixel_values, batch.grids
        # The tower must run as often as on other ranks, so that FSDP's collectives match.
        if pixel_values is None:
            pixel_values, grids = self.family.blank_image(self.model.config)
        return self.encode(pixel_values, grids)

    def _learns_in_tower_alone(self) -> bool:
        """Return whether this forward has gradients in the vision tower and in nothing else.

        A row without images must then run the tower, too. Otherwise backward would have no graph,
        and FSDP would not reduce the gradients of earlier micro-batches, which wait for the last
        one.
        """
        if not torch.is_grad_enabled():
            return False
        trained = {
            part_of(name, self.family)
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        return bool(trained) and "language_model" not in trained

    def _routing(
        self,
        mixture: Mixture,
        batch: MicroBatch,
        load: ExpertLoad | None,
        balance: torch.Tensor | None,
    ) -> Routing:
        """Return the routing of this row: experts to replay, and what to count."""
        device = self.banned.device
        engine_experts = copies = None
        routes = batch.row_columns.get(ROUTES)
        if routes is not None and (self.replay or load is not None):
            engine_experts = on_device(
                routes.reshape(len(batch.ids), len(mixture.layers), mixture.top_k), device
            )
        if load is not None or balance is not None:
            rank_tokens = batch.part.tokens if batch.part else slice(None)
            copies = np.repeat(batch.copies, np.diff(batch.cu_seqlens)).astype(np.float32)
            copies = on_device(copies[rank_tokens], device)
        return Routing(
            engine_experts, replay=self.replay, load=load, copies=copies, balance=balance
        )


def _of_whole_row(
    logprobs: torch.Tensor,
    entropy: torch.Tensor | None,
    ranks: ContextRanks,
    sampled_rows: torch.Tensor,
    n_sampled: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logprobs and entropy of all tokens of a row, from those of each rank's part.

    `sampled_rows` are the places of this rank's tokens among the row's `n_sampled`.
    """
    if entropy is None:
        return ranks.gather_rows(logprobs, sampled_rows, n_sampled), None
    # Logprobs and entropy side by side, so that one collective gathers both.
    columns = torch.cat(
        [logprobs.view(len(sampled_rows), logprobs.shape[1:].numel()), entropy[:, None]], 1
    )
    columns = ranks.gather_rows(columns, sampled_rows, n_sampled)
    return columns[:, :-1].reshape(n_sampled, *logprobs.shape[1:]), columns[:, -1]
