"""Load a `ModelPair` by names, folders and checkpoints."""
