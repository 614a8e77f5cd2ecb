"""Decide how many tokens to draft. `protocol` has the interface, a fixed length and the paper's Algorithm 1.

`goodput` is the default policy, based on the measured times in `costs`. Each new policy is a file here.
"""
