#!/usr/bin/env bash
# Tests and measures on a machine with a GPU what prepare.sh has made: no network, no compiler, no git.
#
#   benchmarks/gpu_run/run.sh PART [OUT]
#
# PART, each at most 260 seconds, the most valuable first:
#   1  check, the self-test of wgmma, calibration, all headline rows without peers, tests (TESTS="tests/ops/...")
#   2  the headline rows and their peers
#   3  ncu on six kernels, racecheck (RACES="--only wgmma"), a sweep (SWEEP="--ops tree_attention --axes batch")
#
# OUT (default build/gpu_results) gets at most five files a part: steps_PART.txt, log_PART.txt with the output of each
# step, and results, whole after each row. A step that fails or runs out of time does not stop the others; the exit
# status is 1 then.
#
# Environment: PREPARED, the folder that prepare.sh made (default build/gpu_run); PYTHON (default python3), which has
# torch with CUDA, Triton and pytest-xdist; COMMIT, named in the results (default: PREPARED's). REHEARSE=1 runs every
# step in tiny sizes on a CPU with the checkout as it is built, simt in the GPU's place and without NVIDIA's tools; the
# names of its files begin with rehearsal_, and its JSON says so.
set -uo pipefail
cd "$(dirname "$0")/../.."

part=${1:-}
if [[ ! $part =~ ^[123]$ ]]; then
  echo "PART: expected 1, 2 or 3, got '$part'" >&2
  exit 2
fi
rehearse=${REHEARSE:-0} python=${PYTHON:-python3}
mkdir -p "${2:-build/gpu_results}" && out=$(cd "${2:-build/gpu_results}" && pwd) || exit 2
[ "$rehearse" = 1 ] && out=$out/rehearsal_ || out=$out/
prepared=$(realpath -m "${PREPARED:-build/gpu_run}")
steps=${out}steps_$part.txt log=${out}log_$part.txt
status=0 child=
: > "$steps" > "$log"

PART_SECONDS=260
END=15  # of which the last step leaves so many

step() {  # name, seconds, command...
  local name=$1 limit=$2 began=$SECONDS code=0 left=$((PART_SECONDS - END - SECONDS))
  shift 2
  ((limit = limit < left ? limit : left))
  if ((limit <= 0)); then
    status=1
    echo "$name: no time is left" | tee -a "$steps"
    return
  fi
  echo "==> $name: $*" >> "$log"
  # In the background, so that a signal to this script is heeded at once.
  timeout --kill-after=3 $limit "$@" >> "$log" 2>&1 &
  child=$!
  wait $child || { code=$? status=1; }
  child=
  echo "$name: exit $code, $((SECONDS - began)) of $limit s, at $SECONDS s" | tee -a "$steps"
  ((code == 0)) || tail -n 8 "$log"
}
trap '[ -n "$child" ] && kill "$child" 2> /dev/null; exit 1' INT TERM

install() {
  local site
  site=$(mktemp -d)
  step install 30 "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$prepared"/wheel/pagedtree-*.whl
  ((status == 0)) || exit 1
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PAGEDTREE_GPU_RUN=$prepared
  export COMMIT=${COMMIT:-$(sed -n 's/^ *"commit": "\(.*\)",$/\1/p' "$prepared/manifest.json")}
}

if [ "$rehearse" = 1 ]; then
  check=(--device cpu --backend simt --quick --only append_kv)
  bench=(--device cpu --backend simt --threads 1 --headline --quick --seconds 0.001) calls=(--rows append_kv)
  machine=(nproc) self_test=(true) calibration=(true)
  profiler=() sanitizer=(env) wanted=(tests/ops/test_commit.py) selection=(-k simt)
  sweep=("${bench[@]}" --rows append_kv) races=()
  export PYTHONPATH=$PWD/python
else
  check=(--device cuda)
  bench=(--device cuda --headline --together) calls=()
  machine=(bash -c "nvidia-smi; '$python' -m pagedtree info")
  self_test=("$python" -m pagedtree check --engine wgmma)
  calibration=("$prepared/calibration" "${out}calibration.jsonl")
  profiler=(ncu --clock-control none --profile-from-start off --set full --export "${out}profile" --page details)
  sanitizer=(compute-sanitizer --tool racecheck --kernel-name kns=pagedtree --target-processes all --error-exitcode 9)
  read -ra wanted <<< "${TESTS:-tests/ops tests/generation/test_fixed_step.py}"
  selection=(-n 12 -k "cuda or fixed_step")
  read -ra sweep <<< "--device cuda --together --seconds 0.2 ${SWEEP:---ops tree_attention --axes batch --peers}"
  read -ra races <<< "--quick ${RACES:---only wgmma}"
  install
fi
PEERS=(pagedtree SDPA FlashInfer flash-attn Triton vLLM)
# Plan and attention; a walk over filtered rows; all rows; a walk by ratios.
PROFILED=("B 1, L 8k, T 16" "verify_sampled, top-p 0.9, B 8" "top-p 0.9, 2048 rows" "verify_rejection, drawn drafts, B 8")

case $part in
  1)
    step machine 30 "${machine[@]}"
    step check 50 "$python" -m pagedtree check "${check[@]}" --json "${out}check.json"
    step wgmma 40 "${self_test[@]}"
    step calibration 45 "${calibration[@]}"
    step calls 120 "$python" benchmarks/bench_ops.py --seconds 0.05 "${bench[@]}" "${calls[@]}" --peers \
      --json "${out}calls.json"
    step tests $PART_SECONDS "$python" -m pytest -q -p no:cacheprovider --maxfail 20 -m "not slow and not stats" \
      "${selection[@]}" "${wanted[@]}"
    ;;
  2)
    step headline $PART_SECONDS "$python" benchmarks/bench_ops.py --seconds 0.3 "${bench[@]}" --peers "${PEERS[@]}" \
      --json "${out}headline.json"
    ;;
  3)
    step profile 100 "${profiler[@]}" "$python" benchmarks/bench_ops.py "${bench[@]}" --call-only --rows "${PROFILED[@]}"
    step racecheck 70 "${sanitizer[@]}" "$python" -m pagedtree check "${check[@]}" "${races[@]}"
    step sweep $PART_SECONDS "$python" benchmarks/bench_ops.py "${sweep[@]}" --json "${out}sweep.json"
    ;;
esac
exit $status
