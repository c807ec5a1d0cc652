"""An engine whose answers are written down beforehand."""

from concurrent.futures import Future

import numpy as np

from rlinf_vl.types import Completion, Sample


class Scripted:
    """An engine whose samples are those of a list, in turn; `requests` are what it was asked."""

    def __init__(self, processor, answers=("18",), cut=()):
        self.processor, self.answers, self.cut = processor, list(answers), cut
        self.requests, self.is_alive, self.version = [], True, 3
        self.prefilled_tokens, self.ended = 0, []

    def submit(self, requests):
        self.requests += requests
        futures = self.futures = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                future.set_exception(answer)
            elif answer is not None:
                future.set_result(
                    Completion(tuple(self.sample(answer, seed) for seed in request.seeds))
                )
        return futures

    def sample(self, answer, seed):
        ids = self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        reason = "error" if answer == "failed" else "length" if answer in self.cut else "stop"
        ids += [self.processor.stop_ids[0]] * (reason == "stop")
        n = len(ids)
        logprobs = -np.arange(1, n + 1, dtype=np.float32) - seed % 10
        columns = {"entropy": np.full(n, 0.5, np.float32)}
        return Sample(
            np.array(ids, np.int32), logprobs, np.full(n, self.version, np.int32), reason, columns
        )

    def end_sessions(self, names):
        self.ended += names

    def alive(self, timeout_s):
        return self.is_alive
