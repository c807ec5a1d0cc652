"""Models of the general path in SGLang's scheduler: transformers' modules over SGLang's KV cache.

The text layers attend through an `AttentionContext`, as in the trainer and the torch engine; here
it is SGLang's attention. Names and layouts of weights are those in memory, so that each weight is
loaded as the trainer sends it.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.mm_utils import general_mm_embed_routine, pad_mm_tokens
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.runtime_context import get_model
from torch import nn
from transformers import AutoConfig

from rlinf_vl.engines.sglang.settings import GENERAL_PATHS
from rlinf_vl.models.families import family_at
from rlinf_vl.models.loading import switch_dropout_off, use_packed_attention
from rlinf_vl.models.policy import encode_images
from rlinf_vl.models.shapes import head_dim


class RadixContext:
    """An `AttentionContext` that attends over SGLang's KV cache."""

    def __init__(self, layers: Any, forward_batch: Any) -> None:
        self._layers = layers
        self._forward_batch = forward_batch

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return [1, T, heads, D] of queries, keys and values [1, heads, T, D]."""
        assert window is None, f"layer {layer} has a window of {window}, see `Family.sglang_limits`"
        attention = self._layers[layer]
        attention.scaling = scaling
        q, k, v = (x[0].transpose(0, 1).flatten(1).contiguous() for x in (q, k, v))
        out = attention(q, k, v, self._forward_batch)
        return out.view(1, len(q), attention.tp_q_head_num, attention.v_head_dim)


class TextModel:
    """The text model of the general path, as `general_mm_embed_routine` calls it."""

    def __init__(self, model: "RlinfVlGeneral") -> None:
        self._model = model

    def get_input_embeddings(self) -> nn.Module:
        return self._model.get_input_embeddings()

    def __call__(
        self,
        input_ids: None,
        forward_batch: Any,
        input_embeds: torch.Tensor,
        positions: torch.Tensor,
        input_deepstack_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states [T, H] of embeddings [T, H] at positions [T]."""
        model, deepstack, image_positions = self._model, (), None
        rotary = forward_batch.mrope_positions
        rows = positions.expand(3, -1) if rotary is None else rotary
        if input_deepstack_embeds is not None:  # zeros at tokens of text
            deepstack = input_deepstack_embeds.split(input_embeds.shape[1], dim=1)
            image_positions = torch.arange(len(input_embeds), device=input_embeds.device)
        return model.family.text_forward(
            model.model.get_submodule(model.family.text_model),
            input_embeds.unsqueeze(0),
            torch.cat([positions[None], rows])[:, None],
            image_positions,
            deepstack,
            context=RadixContext(model.attention, forward_batch),
        )[0]


class RlinfVlGeneral(nn.Module):
    """A vision-language model of transformers, on one GPU or on the CPU."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        trust, paths = get_model().trust_remote_code, getattr(config, GENERAL_PATHS)
        # SGLang has rounded the sizes in its own copy up, where it computes on a CPU.
        config = AutoConfig.from_pretrained(get_model().model_path, trust_remote_code=trust)
        self.family = family_at(config, (paths[0], paths[1]), "", trust)
        switch_dropout_off(config)
        model = self.family.model_class.from_config(
            config,
            dtype=torch.get_default_dtype(),
            attn_implementation="sdpa",
            trust_remote_code=trust,
        )
        self.model: Any = use_packed_attention(model.eval(), self.family)
        text = config.get_text_config()
        self.attention = nn.ModuleList(
            RadixAttention(
                text.num_attention_heads,
                head_dim(text),
                head_dim(text) ** -0.5,
                text.num_key_value_heads,
                layer,
            )
            for layer in range(text.num_hidden_layers)
        )
        self.logits_processor = LogitsProcessor(text)
        layers = self.family.feature_layers(config) - 1
        #: SGLang asks for the number of deepstack layers by this name.
        self.deepstack_visual_indexes = range(layers)

    def get_input_embeddings(self) -> Any:
        """Return the embedding of token ids."""
        return self.model.get_submodule(self.family.text_model).get_input_embeddings()

    def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
        """Put values that identify images in place of their placeholders."""
        return pad_mm_tokens(input_ids, mm_inputs)

    def get_image_feature(self, items: Sequence[Any]) -> torch.Tensor:
        """Return the tokens of images, [N, H · (1 + deepstack layers)]."""
        # SGLang has moved the patches to the GPU by now, where numpy can't read them.
        patches = torch.cat([item.feature for item in items])
        grids = torch.cat([item.image_grid_thw for item in items]).cpu().numpy()
        device = self.get_input_embeddings().weight.device
        features = encode_images(self.model, self.family, patches, grids, device)
        return torch.cat([features.tokens, *features.deepstack], dim=1)

    def separate_deepstack_embeds(
        self, embedding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split what `get_image_feature` returns: tokens, and features of the deepstack layers."""
        width = self.get_input_embeddings().weight.shape[1]
        return embedding[:, :width], embedding[:, width:]

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **_: Any
    ) -> Any:
        """Return SGLang's logits of the tokens of a batch, sequences end to end."""
        hidden_states = general_mm_embed_routine(
            input_ids=input_ids,
            forward_batch=forward_batch,
            language_model=TextModel(self),  # pyright: ignore[reportArgumentType]
            multimodal_model=self,
            use_deepstack={Modality.IMAGE: True} if self.deepstack_visual_indexes else {},
            positions=positions,
        )
        head = self.model.get_output_embeddings()
        return self.logits_processor(input_ids, hidden_states, head, forward_batch)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights and buffers by their names in memory."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, value in weights:
            tensors[name].copy_(value)


EntryClass = RlinfVlGeneral
