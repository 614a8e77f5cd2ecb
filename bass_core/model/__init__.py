"""A transformers model over the ragged KV cache: one forward pass at a time, for target and draft alike."""
