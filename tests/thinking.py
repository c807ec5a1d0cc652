"""Episodes whose thoughts have a budget, on any engine, and what must hold of their tokens. `toy` is as in `accounting`."""

from collections import Counter

import numpy as np
from accounting import Recorded
from episodes import Maker, make_player, message_of, play

from rlinf_vl.envs import StepResult
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import SamplingParams

TURNS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor -%}{{ '<|im_start|>assistant\n' }}"
)
OPENS = TURNS + "{{ '<think>\n' }}"


class Asks:
    """So many questions; `replies` are the answers to them."""

    def __init__(self, turns, replies):
        self.left, self.replies = turns, replies

    def start(self, problem):
        return [message_of("What")]

    def step(self, response):
        self.replies.append(response)
        self.left -= 1
        return StepResult([message_of("x = 3")] * (self.left > 0), 1.0, self.left == 0)

    def close(self):
        pass


def thinking(toy, budget, turns, longest, seq_length=300, temperature=1.5):
    """Three groups of four, at a temperature at which answers are long; (groups, what the engine was asked, the replies)."""
    engine, replies = Recorded(toy.engine), []
    player = make_player(
        engine,
        toy.processor,
        Maker(lambda seed: Asks(turns, replies)),
        seq_length=seq_length,
        max_prompt_length=100,
        thought_tokens=budget,
    )
    sampling = SamplingParams(
        temperature=temperature, max_new_tokens=longest, stop_ids=toy.processor.stop_ids
    )
    return (
        play(player, [range(4 * g, 4 * g + 4) for g in range(3)], sampling),
        engine.asked,
        replies,
    )


def assert_pieces(toy, groups, asked, budget, longest):
    """Each token is one that the engine drew behind exactly what stands before it, or closes a thought; no thought is longer than
    its budget, and no answer than `longest`."""
    closing = Renderer(toy.processor).closing
    drawn = {}
    for request, future in asked:
        for sample in future.result().samples:
            drawn.setdefault((request.ids.tobytes(), sample.ids.tobytes()), []).append(
                sample.logprobs
            )
    used = Counter()
    for t in (t for group in groups for t in group.trajectories):
        assert t.error is None and len(t.turn_thoughts) == len(t.turns)
        for turn, (thought, behind, closed) in zip(t.turns, t.turn_thoughts, strict=True):
            s, at = t.sequences[turn.sequence], turn.start
            assert turn.end - turn.start == thought + behind + closed <= longest and closed in (
                0,
                len(closing),
            )
            while at < turn.end:
                if not s.loss_mask[at]:
                    assert s.ids[at : at + len(closing)].tolist() == closing.tolist()
                    assert (
                        not s.loss_mask[at : at + len(closing)].any()
                        and not s.logprobs[at : at + len(closing)].any()
                    )
                    assert (
                        s.versions[at : at + len(closing)] == -1
                    ).all() and at - turn.start == budget
                    at += len(closing)
                    continue
                key = next(
                    (s.ids[:at].tobytes(), s.ids[at:end].tobytes())
                    for end in range(turn.end, at, -1)
                    if (s.ids[:at].tobytes(), s.ids[at:end].tobytes()) in drawn
                )
                end = at + len(key[1]) // 4
                assert s.loss_mask[at:end].all() and any(
                    np.array_equal(s.logprobs[at:end], d) for d in drawn[key]
                )
                used[key] += 1
                at = end
    assert used == Counter({key: len(samples) for key, samples in drawn.items()}), (
        "all that was drawn, once"
    )
