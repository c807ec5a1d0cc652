"""Vision-language models: the family table, loading, processing, M-RoPE positions, attention, and the logprob head."""
