"""Names, folders and checkpoints -> a `ModelPair`."""
