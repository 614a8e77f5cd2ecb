"""The algorithm: rows of a batch draft, are verified and commit. `Session._decode` calls what stands here."""
