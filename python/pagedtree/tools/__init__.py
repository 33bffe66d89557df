"""Commands of `python -m pagedtree`: what is installed, benchmarks, and what reads compiled kernels."""
