"""The decoding loop: rows of a batch draft, are verified and commit. `Session._decode` calls these modules."""
