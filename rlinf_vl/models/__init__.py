"""Vision-language models: families, loading, processing, positions, attention and logprobs."""
