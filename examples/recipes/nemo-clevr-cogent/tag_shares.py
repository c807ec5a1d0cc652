"""A reward for the form of an answer, as NeMo RL weighs it: a quarter for <think>, the rest for <answer>."""

SHARES = {"think": 0.25, "answer": 0.75}


def tag_shares(response: str) -> float:
    """Return the sum of the shares of the tags that a response opens and then closes."""
    score = 0.0
    for tag, share in SHARES.items():
        opened, _, rest = response.partition(f"<{tag}>")
        if opened != response and f"</{tag}>" in rest:
            score += share
    return score
