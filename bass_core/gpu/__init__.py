"""Faster decode steps: captured as CUDA graphs, overlapped with the host, with compiled layers."""
