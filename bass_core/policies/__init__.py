"""How many tokens to draft. `protocol` holds the interface, a fixed length and the paper's Algorithm 1.

`goodput` is the default policy, which goes by the measured times in `costs`. A new policy is a file here.
"""
