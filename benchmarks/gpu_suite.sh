#!/usr/bin/env bash
# Tests and measures everything on a machine with a GPU, without a network, git or a package index.
#
#   benchmarks/gpu_suite.sh [OUT [PART]]
#
# PART, each under ten minutes, the most valuable first; all (the default) is one after the other:
#   headline    python -m pagedtree check; the rows of headline.py with their targets
#   tests       the op tests on the GPU, captured steps and their replay
#   sanitizers  compute-sanitizer over some rows of check: addresses, races in shared memory, barriers
#   attention   the sweeps of tree_attention, then those over latent caches
#   others      the sweeps of the other ops
#
# OUT (default build/gpu_suite) gets at most eight files: stages_PART.json, JSON of the benchmarks, logs_PART.tar.gz,
# and running.log of the stage that runs. Whenever this script is killed they are there, whole; a benchmark's JSON has
# the rows so far. A stage that fails or runs out of time does not stop the others; the exit status is 1 then.
#
# What is tested: the wheel WHEEL; or one in dist/ that fits the Python at hand, if no source is newer; or else this
# checkout, built for the GPU that is present (with nvcc, cmake, ninja, pybind11). Needs torch with CUDA, numpy, pytest
# and hypothesis; with pytest-xdist tests run on several workers.
#
# Environment: PYTHON (default python3); COMMIT, named in the results where there is no git; FLASHINFER_INCLUDE, the
# folder of FlashInfer's headers, with which its kernel is compiled as a peer (flashinfer_kernel.py). DEVICE=cpu
# BACKEND=simt rehearses all of it on a CPU in tiny sizes, with the checkout as it is built. STAGE_SECONDS shortens each
# stage's limit.
set -uo pipefail
cd "$(dirname "$0")/.."

PARTS=(headline tests sanitizers attention others)
part=${2:-all}
if [[ ! " all ${PARTS[*]} " == *" $part "* ]]; then
  echo "PART: expected all or one of ${PARTS[*]}, got $part" >&2
  exit 2
fi
mkdir -p "${1:-build/gpu_suite}" && out=$(cd "${1:-build/gpu_suite}" && pwd) || exit 2
device=${DEVICE:-cuda} backend=${BACKEND:-${DEVICE:-cuda}} python=${PYTHON:-python3}
work=$(mktemp -d) logs=$(mktemp -d)
export out device backend python work

# Stages ---------------------------------------------------------------------------------------------------------------

PART_SECONDS=590
status=0 entries=() child=

record() {  # name, the rest of its JSON; then all files of OUT are up to date
  entries+=("\"$1\": {\"part\": \"$each\", $2}")
  (
    IFS=$'\n' joined=$(printf ',\n  %s' "${entries[@]}")
    printf '{"part": "%s", "device": "%s", "backend": "%s", "total_seconds": %d, "stages": {\n%s\n}}\n' \
      "$part" "$device" "$backend" "$SECONDS" "${joined:2}"
  ) > "$work/stages.json"
  mv "$work/stages.json" "$out/stages_$part.json"
  tar -C "$logs" -czf "$work/logs.tar.gz" . && mv "$work/logs.tar.gz" "$out/logs_$part.tar.gz"
}

stage() {  # name, seconds, command...; its output goes into logs_PART.tar.gz as name.log
  local name=$1 limit=$2 began=$SECONDS code=0
  local left=$((part_end - SECONDS)) bound=${STAGE_SECONDS:-$limit}
  shift 2
  if ((left <= 0)); then
    status=1
    record "$name" "\"exit\": 124, \"seconds\": 0, \"limit\": $limit"
    return 1
  fi
  ((bound = bound < limit ? bound : limit, bound = bound < left ? bound : left))
  # In the background, so that a signal to this script is heeded at once.
  timeout --kill-after=5 $bound "$@" > "$out/running.log" 2>&1 &
  child=$!
  wait $child || code=$?
  child=
  mv "$out/running.log" "$logs/$name.log"
  record "$name" "\"exit\": $code, \"seconds\": $((SECONDS - began)), \"limit\": $limit"
  printf '%-12s exit %d, %d s\n' "$name" $code $((SECONDS - began))
  if ((code)); then
    status=1
    tail -n 15 "$logs/$name.log"
  fi
  return $code
}

skip() {  # name, why
  record "$1" "\"skipped\": \"$2\""
  echo "$1 skipped: $2"
}

finish() {
  [ -n "$child" ] && kill "$child" 2> /dev/null
  rm -rf "$work" "$logs"
}
trap finish EXIT
trap 'status=1; exit 1' INT TERM

# What is tested -------------------------------------------------------------------------------------------------------

machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv || exit
  "$python" -c 'import platform, torch
print("python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)
print(torch.cuda.get_device_properties(0) if torch.cuda.is_available() else "torch sees no GPU")'
  command -v nvcc compute-sanitizer
  true
}

# A wheel's path; nothing where the checkout is newer than all wheels that fit.
choose_wheel() {
  if [ -n "${WHEEL:-}" ]; then
    echo "$WHEEL"
    return
  fi
  local tag newest
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  newest=$(ls -t dist/pagedtree-*-"$tag"-*.whl 2> /dev/null | head -n 1)
  [ -n "$newest" ] || return 0
  if [ -z "$(find csrc cmake CMakeLists.txt setup.py pyproject.toml -type f -newer "$newest" -print -quit)" ] &&
    [ -z "$(find python -name '*.py' -newer "$newest" -print -quit)" ]; then
    echo "$newest"
  fi
}

install_package() {
  local wheel
  wheel=$(choose_wheel)
  if [ -n "$wheel" ]; then
    echo "wheel $wheel"
    "$python" -m pip install --no-index --no-deps --no-compile --target "$work/site" "$wheel"
  elif [ "$device" = cuda ]; then
    echo "checkout $PWD, built"
    PAGEDTREE_SIMT=1 MAX_JOBS=$(nproc) "$python" setup.py -q build_ext --inplace
  else
    echo "checkout $PWD, as it is"
  fi || return
  PYTHONPATH=$(package_path) "$python" -m pagedtree info
}

package_path() {
  local folder=$PWD/python
  [ -d "$work/site" ] && folder=$work/site
  echo "$folder${PYTHONPATH:+:$PYTHONPATH}"
}
export -f machine choose_wheel install_package package_path

prepare() {  # once in a run
  [ -z "${prepared:-}" ] || return 0
  stage machine 45 bash -c machine && stage install 160 bash -c install_package || return 1
  PYTHONPATH=$(package_path)
  export PYTHONPATH
  prepared=1
}

# Parts ----------------------------------------------------------------------------------------------------------------

if [ "$device" = cuda ]; then
  check=(--device cuda)
  bench=(--device cuda --seconds 0.5)
  headline_rows=(--headline)
  attention_rows=(--ops tree_attention latent_attention) other_rows=(--without tree_attention latent_attention)
  captures=(tests/ops/test_captured_step.py tests/generation/test_fixed_step.py)
  captured=(-k "$backend or fixed_step")
  tests=(tests --ignore tests/kernels/test_simt.py --ignore tests/kernels/test_sass.py "${captures[@]/#/--ignore=}")
else
  check=(--device "$device" --backend "$backend" --quick)
  bench=(--device "$device" --backend "$backend" --seconds 0.01 --peers causal SDPA)
  headline_rows=(--headline --quick --processes --ops tree_attention latent_attention sample)
  attention_rows=(--ops tree_attention --shapes batch=1 length=64 "tree=chain 4" heads=4/1,8/8)
  other_rows=(--ops append_kv --quick)
  tests=(tests/ops/test_commit.py)
  captures=(tests/ops/test_captured_step.py)  # one of those that are slow elsewhere
  captured=(-m "not stats" -k "trees and host and not latent and not recurrent and $backend")
fi

headline() {
  stage check 115 "$python" -m pagedtree check "${check[@]}" --json "$out/check.json"
  # Compiled here, so that no row of the benchmark waits for it.
  if [ -n "${FLASHINFER_INCLUDE:-}" ]; then
    stage flashinfer 50 "$python" benchmarks/flashinfer_kernel.py
  else
    skip flashinfer "FLASHINFER_INCLUDE is not set"
  fi
  stage headline 215 "$python" benchmarks/bench_ops.py "${bench[@]}" "${headline_rows[@]}" --json "$out/headline.json"
  grep -v '^\[' "$logs/headline.log"
}

tests() {
  local workers=() count=$(($(nproc) / 2))
  ((count > 1)) && "$python" -c 'import xdist' 2> /dev/null && workers=(-n $((count < 8 ? count : 8)))
  local options=(-q -p no:cacheprovider --maxfail 40 -m "not slow and not stats")
  stage op_tests 250 "$python" -m pytest "${options[@]}" "${workers[@]}" -k "$backend" "${tests[@]}" \
    --junitxml "$logs/op_tests.xml"
  stage captures 75 "$python" -m pytest "${options[@]}" "${captured[@]}" "${captures[@]}"
}

sanitizers() {
  if ! command -v compute-sanitizer > /dev/null; then
    skip sanitizers "compute-sanitizer is not here"
    return
  fi
  # Each tensor is an allocation of its own, so that memcheck sees a step past its end.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  local tool limits=(150 150 80)
  for tool in memcheck racecheck synccheck; do
    stage $tool "${limits[0]}" compute-sanitizer --tool $tool --kernel-name kns=pagedtree --target-processes all \
      --error-exitcode 9 "$python" -m pagedtree check "${check[@]}" --quick
    limits=("${limits[@]:1}")
  done
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
}

attention() {
  stage attention 380 "$python" benchmarks/bench_ops.py "${bench[@]}" "${attention_rows[@]}" \
    --json "$out/attention.json"
}

others() {
  stage others 380 "$python" benchmarks/bench_ops.py "${bench[@]}" "${other_rows[@]}" --json "$out/others.json"
}

[ "$part" = all ] && chosen=("${PARTS[@]}") || chosen=("$part")
for each in "${chosen[@]}"; do
  part_end=$((SECONDS + PART_SECONDS))
  prepare || break
  $each
done
exit $status
