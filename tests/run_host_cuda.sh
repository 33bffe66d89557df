#!/usr/bin/env bash
# Runs the tests of the backend cuda where no GPU is: its tensors are Torch's CUDA tensors, in memory of the host, and
# simt executes its kernels. Shows that a test makes its tensors on the GPU, strides included. Needs a Torch without
# CUDA and a build with simt. Left out: CUDA graphs, events, Triton and CUDA's own ops. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=$PWD/build/host_cuda
package=$tree/python/pagedtree
rm -rf "$tree"
mkdir -p "$package"
cp -r python/pagedtree/. "$package"
cp "$package/lib/libpagedtree_simt.so" "$package/lib/libpagedtree_cuda.so"

torch=$(python -c "import os, torch; print(os.path.dirname(torch.__file__))")
c++ -std=c++20 -O1 -fPIC -shared tests/simt/host_cuda.cpp -o "$tree/libhost_cuda.so" \
  -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -L"$torch/lib" -Wl,-rpath,"$torch/lib" -ltorch_cpu -lc10

env HOST_CUDA="$tree/libhost_cuda.so" PYTEST_PLUGINS=host_cuda PYTHONPATH="$tree/python:$PWD/tests/simt" OMP_NUM_THREADS=1 \
  python -m pytest -m "not slow and not stats" -k "cuda and not torch_conv1d and not follow_their_tensors and not (gradients and compiled)" \
  -o faulthandler_timeout=3000 --ignore=tests/{ops/test_captured_step,repo/test_packaging}.py "$@"
