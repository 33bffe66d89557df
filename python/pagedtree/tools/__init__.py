"""Commands of `python -m pagedtree`: installation info, benchmarks, and readers of compiled kernels."""
