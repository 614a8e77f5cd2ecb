"""Time ragged-attention kernels and their peers on a GPU: `PYTHONPATH=.:kernels python -m bass_lab.gpu.kernels`.

Kernels are checked against float64 first. CUDA graphs over KV sets that exceed the L2 cache are then timed interleaved,
with the bandwidth of a copy. `--dry-run` runs everything on a CPU, with meaningless times.
"""
