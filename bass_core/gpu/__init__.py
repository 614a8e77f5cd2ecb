"""The same decode steps on a GPU: recorded as CUDA graphs, launched ahead, through compiled layers."""
