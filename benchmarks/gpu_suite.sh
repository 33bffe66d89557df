#!/usr/bin/env bash
# Tests and measures everything on one GPU machine, in under nine minutes, without a network.
#
#   benchmarks/gpu_suite.sh [OUT] [WHEEL]
#
# OUT (default build/gpu_suite) gets logs and JSON. WHEEL, or a wheel in dist/ that fits the Python at hand, is installed
# beside nothing else; where there is none, or nvcc is at hand and the sources are newer, the checkout is built for the GPU
# that is present. Needs torch with CUDA, numpy, pytest and hypothesis; to build also cmake, ninja, pybind11 and nvcc.
# A stage that fails or runs out of its time does not stop the others; the exit status tells.
set -uo pipefail
cd "$(dirname "$0")/.."

out=$(mkdir -p "${1:-build/gpu_suite}" && cd "${1:-build/gpu_suite}" && pwd)
wheel=${2:-}
work=$PWD/build/gpu_suite_work
status=0
: > "$out/stages.txt"

stage() {  # name, seconds, command...: its output goes to OUT/name.log
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  timeout --kill-after=5 "$limit" "$@" > "$out/$name.log" 2>&1 || code=$?
  printf '%s\t%d\t%d\n' "$name" "$code" $((SECONDS - start)) | tee -a "$out/stages.txt"
  if [ $code != 0 ]; then
    status=1
    tail -n 15 "$out/$name.log"
  fi
  return $code
}

machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
  python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.get_device_name())'
  git log -1 --format='commit %h %cs' 2> /dev/null || true
  command -v nvcc compute-sanitizer || true
}

install_package() {
  rm -rf "$work/site"
  if [ -z "$wheel" ]; then
    tag=cp$(python -c 'import sys; print("%d%d" % sys.version_info[:2])')
    wheel=$(ls -t dist/pagedtree-*-"$tag"-*.whl 2> /dev/null | head -n 1)
  fi
  if [ -n "$wheel" ]; then
    python -m pip install --no-index --no-deps --no-compile --target "$work/site" "$wheel"
  else
    PAGEDTREE_SIMT=1 MAX_JOBS=$(nproc) python setup.py -q build_ext --inplace
  fi
}

# Bound, so that a hang in one kernel costs that stage only.
stage machine 60 machine || exit 1
export -f install_package
export work wheel
stage install 300 bash -c install_package || exit 1
[ -d "$work/site" ] && export PYTHONPATH=$work/site || export PYTHONPATH=$PWD/python
stage info 60 python -m pagedtree info --json

stage smoke 60 python benchmarks/smoke.py --device cuda
stage op_tests 200 python -m pytest -q --maxfail 20 -p no:cacheprovider -m "not slow and not stats" -k "cuda or fixed_step" tests \
  --ignore tests/test_simt.py --ignore tests/test_sass.py --junitxml "$out/op_tests.xml"

# racecheck watches shared memory, synccheck the barriers, memcheck every address.
for tool in memcheck racecheck synccheck; do
  if command -v compute-sanitizer > /dev/null; then
    stage "$tool" 60 compute-sanitizer --tool $tool --error-exitcode 9 python benchmarks/smoke.py --device cuda
  else
    echo "compute-sanitizer is not here" | tee "$out/$tool.log"
  fi
done

# Every op against the CPU backend on hostile shapes, each ptx:: function, capture and replay, ten calls measured.
stage check 150 python -m pagedtree check --device cuda --json "$out/check.json"

stage bench_ops 150 python benchmarks/bench_ops.py --device cuda --seconds 0.5 --axes batch length tree \
  --ops tree_attention verify_greedy verify_sampled sample --json "$out/ops_cuda.json"

python - "$out" << 'PYTHON'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
rows = [line.split("\t") for line in (out / "stages.txt").read_text().splitlines()]
stages = {name: {"exit": int(code), "seconds": int(seconds)} for name, code, seconds in rows}
(out / "suite.json").write_text(json.dumps({"stages": stages, "total_seconds": sum(s["seconds"] for s in stages.values())}, indent=1))
PYTHON
cat "$out/stages.txt"
exit $status
