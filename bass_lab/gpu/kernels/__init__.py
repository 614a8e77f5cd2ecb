"""Ragged-attention kernels against their peers on a GPU: `PYTHONPATH=.:kernels python -m bass_lab.gpu.kernels`.

Correct first, against float64; then CUDA graphs over KV sets that together do not fit the L2 cache, all kernels in
turn, beside the bandwidth of a copy. `--dry-run` goes through all of it on a CPU, in times that mean nothing.
"""
