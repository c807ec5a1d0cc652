"""Forward hooks on a transformers model that put its activations into a trace.

The trainer's and the engine's models are the same modules with other forwards, so the same hooks
serve all implementations; what differs is which tokens a forward's rows are (`rows`).
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlinf_vl.models.family import Family
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.quantities import Owner, Quantity, Trace

#: Names of the attention and of the gated MLP in the layers of transformers' models.
ATTENTION, MLP, EXPERTS = ("self_attn", "linear_attn"), ("mlp",), ("experts",)
#: Rows [N, …] of a forward → the rows of each owner.
Rows = Callable[[torch.Tensor], Iterable[tuple[Owner, torch.Tensor]]]


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor, float32 or of its integer type."""
    if tensor.is_floating_point():
        tensor = tensor.float()
    return tensor.detach().cpu().numpy().copy()


class Hooks:
    """The hooks on one model.

    Attributes:
        trace: receives the activations.
        rows: splits the rows of the running forward by sequence; None: nothing is recorded.
        append: whether the rows follow those recorded before, as in decoding; otherwise the first
            forward of a sequence counts.
        images: whether the vision tower's forwards are recorded.
    """

    def __init__(self, model: nn.Module, family: Family, trace: Trace) -> None:
        self.trace = trace
        self.rows: Rows | None = None
        self.append = False
        self.images = True
        self._handles: list[Any] = []
        self._image_rows: list[tuple[str, int]] = []
        self._rotary: list[torch.Tensor] = []
        text = model.get_submodule(family.text_model)
        self._add(text.register_forward_pre_hook(self._before_text, with_kwargs=True))
        self._add(text.register_forward_hook(self._after_text))
        for name, module in text.named_modules():
            if name.rpartition(".")[2] == "rotary_emb":
                self._add(module.register_forward_hook(self._after_rotary))
        for number, block in enumerate(model.get_submodule(family.text_blocks).children()):
            self._add_layer("decoder layer", number, block)
        if family.vision_tower and family.vision_blocks:
            tower = model.get_submodule(family.vision_tower)
            self._add(tower.register_forward_pre_hook(self._before_tower, with_kwargs=True))
            for number, block in enumerate(model.get_submodule(family.vision_blocks).children()):
                self._add(block.register_forward_hook(self._after_vision_block(number)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _add(self, handle: Any) -> None:
        self._handles.append(handle)

    def put(self, quantity: Quantity, tensor: torch.Tensor) -> None:
        """Store the rows of a tensor [N, …] of the running forward."""
        if self.rows is None:
            return
        store = self.trace.append if self.append else self.trace.put
        for owner, part in self.rows(tensor):
            store(quantity, owner, as_array(part))

    # --- text ---------------------------------------------------------------------------------------

    def _before_text(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._rotary = []
        if self.rows is None:
            return
        embeds = kwargs.get("inputs_embeds")
        positions = kwargs.get("position_ids")
        ids = kwargs.get("input_ids")
        shape = (embeds if embeds is not None else ids).shape[:2]  # pyright: ignore[reportOptionalMemberAccess]
        if positions is None:
            positions = torch.arange(shape[1]).expand(1, *shape)
        if positions.ndim == 2:
            positions = positions.unsqueeze(0)
        # Row 0 of four counts the text alone; the other three turn into rotary angles.
        positions = positions[1:] if len(positions) == 4 else positions
        positions = positions.expand(3, *shape).permute(1, 2, 0).flatten(0, 1)
        self.put(Quantity.of("positions"), positions)
        deepstack = kwargs.get("deepstack_visual_embeds") or ()
        where = kwargs.get("visual_pos_masks")
        for number, features in enumerate(deepstack):
            token_features = features.new_zeros(shape.numel(), features.shape[-1])
            token_features[where.reshape(-1)] = features.detach()  # pyright: ignore[reportOptionalMemberAccess]
            self.put(Quantity.of("deepstack features", number), token_features)

    def _after_text(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._rotary:
            self.put(Quantity.of("rotary angles"), torch.cat(self._rotary, dim=-1))
        hidden = output.last_hidden_state
        self.put(Quantity.of("final norm"), hidden.flatten(0, 1))

    def _after_rotary(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.rows is None:
            return
        rows = args[0].shape[:2] if args else output[0].shape[:2]
        for angles in output:
            # Some modules return one row for a whole batch.
            self._rotary.append(angles.float().expand(*rows, -1).flatten(0, 1))

    def _add_layer(self, stage: str, number: int, block: nn.Module) -> None:
        def flat(value: Any) -> torch.Tensor:
            tensor = value[0] if isinstance(value, tuple) else value
            return tensor.flatten(0, 1)

        def before(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            first = Quantity.of("embeddings")
            self.put(Quantity.of(stage, number, "input") if number else first, flat(hidden))

        def after(part: str) -> Callable[..., None]:
            return lambda module, args, output: self.put(
                Quantity.of(stage, number, part), flat(output)
            )

        def before_mlp(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.put(Quantity.of(stage, number, "mlp input"), flat(hidden))

        def before_experts(module: nn.Module, args: Any) -> None:
            experts = next(x for x in args[1:] if not x.is_floating_point())
            # The order of a token's experts does not matter.
            self.put(Quantity.of(stage, number, "experts"), experts.sort(-1).values)

        self._add(block.register_forward_pre_hook(before, with_kwargs=True))
        self._add(block.register_forward_hook(after("output")))
        for name, module in block.named_modules():
            last = name.rpartition(".")[2]
            if name in ATTENTION:
                self._add(module.register_forward_hook(after("attention")))
            elif name in MLP:
                self._add(module.register_forward_pre_hook(before_mlp, with_kwargs=True))
                self._add(module.register_forward_hook(after("mlp")))
            elif last in EXPERTS:
                self._add(module.register_forward_pre_hook(before_experts))

    # --- images -------------------------------------------------------------------------------------

    def _before_tower(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._image_rows = []
        if not self.images:
            return
        inputs = [*args, *kwargs.values()]
        patches = next(x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point())
        grids = kwargs.get("grid_thw")
        counts = [1] * len(patches) if grids is None else grids.prod(1).tolist()
        for part in patches.detach().split(counts):
            self._image_rows.append((pixel_digest(part.float().cpu().numpy()), len(part)))

    def _after_vision_block(self, number: int) -> Callable[..., None]:
        quantity = Quantity.of("vision layer", number, "output")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            counts = [n for _, n in self._image_rows]
            if len(hidden) == 1 and sum(counts) != 1:
                hidden = hidden[0]
            if not counts or sum(counts) != len(hidden):
                return
            for (name, _), part in zip(self._image_rows, hidden.split(counts), strict=True):
                self.trace.put(quantity, name, as_array(part.flatten(0, -2)))

        return after


def split_embeddings(trace: Trace, image_tokens: ImageTokens, step: RecordedStep) -> None:
    """Move the rows of image tokens among the embeddings to the vision features; each quantity has
    zeros in the place of the other's rows."""
    embeddings = trace.values.get(Quantity.of("embeddings"), {})
    for owner, values in list(embeddings.items()):
        g, i, k = owner
        ids = step.groups[int(g)].trajectories[int(i)].sequences[int(k)].ids[: len(values)]
        mask = image_tokens.mask(ids)[:, None]
        if mask.any():
            features = np.where(mask, values, 0.0)
            trace.put(Quantity.of("vision features"), owner, features)
        embeddings[owner] = np.where(mask, 0.0, values)


def pixel_digest(pixels: np.ndarray) -> str:
    """Return a name for an image's pixels, the same in float32 and in bfloat16."""
    rounded = torch.from_numpy(np.ascontiguousarray(pixels, np.float32)).bfloat16()
    raw = rounded.contiguous().flatten().view(torch.int16).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


def whole(owner: Owner) -> Rows:
    """Return the `Hooks.rows` of a forward of one sequence."""
    return lambda tensor: [(owner, tensor)]


def gathered(index: Sequence[tuple[Owner, np.ndarray]]) -> Rows:
    """Return the `Hooks.rows` of a packed row; `index` has the row positions of each sequence's
    tokens."""
    places = [(owner, torch.from_numpy(positions)) for owner, positions in index]
    return lambda tensor: [(owner, tensor[positions]) for owner, positions in places]
