"""A policy without a model: answers that are written beforehand, sampled by an engine that is none.

`check-env` plays agents against it, so it needs neither a GPU nor a checkpoint: its tokenizer is
the toys', which is made in a moment and can encode any text.
"""

import copy
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from rlinf_vl.config.toys import TOYS
from rlinf_vl.extras.toy.files import write_toy_files
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.types import Completion, Request, Sample

#: Shows tools' schemas before the messages; the toys' own template shows names and arguments only.
TOOLS_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
"""


def scripted_processor() -> Processor:
    """Return the processor of a policy that reads images, tools and any text."""
    with tempfile.TemporaryDirectory(prefix="rlinf-policy-") as name:
        folder = Path(name)
        # A long answer is mostly words: as one token each they are tried in a moment.
        write_toy_files(folder, ("word", " word"))
        model_type = TOYS["toy"].model_type
        config = {"model_type": model_type}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        processor = Processor(folder, family_of(model_type))
    # transformers warns of every text that is longer.
    processor.tokenizer.model_max_length = 2**31
    processor.tokenizer.chat_template = TOOLS_TEMPLATE + processor.tokenizer.chat_template
    return processor


class ScriptedEngine:
    """The generation half of an `Engine`, whose answers a function gives.

    Attributes:
        requests: those that were submitted.
    """

    version = 0
    prefilled_tokens = 0

    def __init__(self, processor: Processor, answer: Callable[[str], str]) -> None:
        """`answer` gets the text of a prompt, without its images, and returns the reply."""
        self.requests: list[Request] = []
        self._answer, self._stop_id = answer, processor.stop_ids[0]
        self._decode = processor.tokenizer.decode
        # A copy: the option for texts that spell control tokens changes the tokenizer for all.
        self._tokenizer = copy.deepcopy(processor.tokenizer)

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = []
        for request in requests:
            self.requests.append(request)
            prompt = self._decode(request.ids.tolist(), skip_special_tokens=True)
            samples = [self._sample(prompt, request) for _ in request.seeds]
            futures.append(Future())
            futures[-1].set_result(Completion(tuple(samples)))
        return futures

    def end_sessions(self, names: Sequence[str]) -> None:
        """Do nothing: it has no caches."""

    def alive(self, timeout_s: float) -> bool:
        return True

    def _sample(self, prompt: str, request: Request) -> Sample:
        # As text: an engine never samples control tokens or image placeholders.
        encoded = self._tokenizer(
            self._answer(prompt), add_special_tokens=False, split_special_tokens=True
        )
        ids = [*encoded["input_ids"], self._stop_id]
        limit = request.sampling.max_new_tokens
        n_tokens, finish_reason = min(len(ids), limit), "length" if len(ids) > limit else "stop"
        zeros = np.zeros(n_tokens)
        return Sample(
            np.array(ids[:limit], np.int32),
            zeros.astype(np.float32),
            zeros.astype(np.int32),
            finish_reason,
        )
