"""The acceptance rules and what they stand on: which drafted tokens stay, and which token follows.

Start reading the library here, at `verification.token`.
"""
