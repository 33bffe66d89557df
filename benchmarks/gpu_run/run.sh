#!/usr/bin/env bash
# Tests and measures on a machine with a GPU what prepare.sh has made: no network, no compiler, no git.
#
#   benchmarks/gpu_run/run.sh PART [OUT]
#
# PART, the most valuable first (benchmarks/README.md has seconds and sizes):
#   check    check, the self-test of wgmma
#   step     whole steps, in tokens per second
#   walk     verification, recurrent layers, rope_append: once with each wheel, variants/ included (WALK="--rows TEXT")
#   boxes    attention, likewise (BOXES="--ops NAME")
#   trace    where CTAs spend a call, with the wheel in variants/trace (TRACE="NAME of a row")
#   1        as check; calibration, all headline rows without peers, tests (TESTS="tests/ops/...")
#   2        the headline rows and their peers
#   3        ncu on six kernels, racecheck (RACES="--only wgmma"), a sweep (SWEEP="--ops tree_attention --axes batch")
#   real     answers of a real model, once all of PREPARED_text is there
#   jetspec  a step of JetSpec's engine with its kernel and with ours, if prepare.sh was given it
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
declare -A LIMITS=([check]=75 [step]=240 [walk]=120 [boxes]=240 [trace]=60 [1]=260 [2]=260 [3]=260 [real]=120)
LIMITS[jetspec]=240
if [ -z "${LIMITS[${part:-none}]:-}" ]; then
  echo "PART: expected one of ${!LIMITS[*]}, got '$part'" >&2
  exit 2
fi
rehearse=${REHEARSE:-0} python=${PYTHON:-python3}
mkdir -p "${2:-build/gpu_results}" && out=$(cd "${2:-build/gpu_results}" && pwd) || exit 2
[ "$rehearse" = 1 ] && out=$out/rehearsal_ || out=$out/
prepared=$(realpath -m "${PREPARED:-build/gpu_run}")
steps=${out}steps_$part.txt log=${out}log_$part.txt
status=0 child=
: > "$steps" > "$log"

PART_SECONDS=${LIMITS[$part]}
END=5  # of which the last step leaves so many

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
  return $code
}
trap '[ -n "$child" ] && kill "$child" 2> /dev/null; exit 1' INT TERM

install() {  # the wheels of a folder, once
  local pip=("$python" -m pip install -q --no-index --no-deps --no-compile)
  [ -d "$1/site" ] || step install 30 "${pip[@]}" --target "$1/site" "$1"/*.whl || { rm -rf "$1/site"; exit 1; }
}

by_wheel() {  # options for bench_ops.py...: rows that are measured with each wheel
  local folder name each=$((PART_SECONDS / ${#wheels[@]}))
  for folder in "${wheels[@]}"; do
    name=$(basename "$folder")
    ((rehearse)) || install "$folder"
    PYTHONPATH=$folder/site:$PYTHONPATH COMMIT="${COMMIT:-}, $name" step "$name" $each \
      "$python" benchmarks/bench_ops.py --seconds 0.05 "${bench[@]}" "$@" --peers --json "$out${part}_$name.json"
  done
}

if [ "$rehearse" = 1 ]; then
  check=(--device cpu --backend simt --quick --only append_kv)
  bench=(--device cpu --backend simt --threads 1 --headline --quick --seconds 0.001) calls=(--rows append_kv)
  machine=(nproc) self_test=(true) calibration=(true)
  profiler=() sanitizer=(env) wanted=(tests/ops/test_commit.py) selection=(-k simt)
  sweep=("${bench[@]}" --rows append_kv) races=() walk=(--rows append_kv) boxes=("${walk[@]}") wheels=("$prepared/wheel")
  traced=("B 1, L 8k, T 16")
  whole=(--device cpu --tiny) jetspec=(--tiny)
  real=(--device cpu --dtypes float32 --sequences 1 --prompts 1 --max-new-tokens 4 --ways "n-gram tree")
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
  walk=(--rows verify_greedy "top-p 0.9, B" "256 chains" recurrent_step rope_append "top-p 0.9, 256 rows")
  [ -z "${WALK:-}" ] || read -ra walk <<< "$WALK"
  traced=("${TRACE:-R 256}" "B 1, L 8k, T 16" prompts)
  read -ra boxes <<< "${BOXES:---ops tree_attention latent_attention}"
  whole=(--device cuda --seconds 205) jetspec=(--seconds 220)
  real=(--device cuda --dtypes bfloat16 --sequences 1 8 --prompts 8 --max-new-tokens 64)
  shopt -s nullglob
  wheels=("$prepared/wheel")
  for folder in "$prepared"/variants/*; do [ "${folder##*/}" = trace ] || wheels+=("$folder"); done
  install "$prepared/wheel"
  export PYTHONPATH=$prepared/wheel/site${PYTHONPATH:+:$PYTHONPATH} PAGEDTREE_GPU_RUN=$prepared
  export COMMIT=${COMMIT:-$(sed -n 's/^ *"commit": "\(.*\)",$/\1/p' "$prepared/manifest.json")}
  # A verdict lies in the cache of a machine that may be new.
  [[ $part = check || $part = 1 ]] || export PAGEDTREE_ENGINE=wgmma
fi
PEERS=(pagedtree SDPA FlashInfer flash-attn Triton vLLM)
# Plan and attention; a walk over filtered rows; all rows; a walk by ratios.
PROFILED=("B 1, L 8k, T 16" "verify_sampled, top-p 0.9, B 8" "top-p 0.9, 2048 rows" "verify_rejection, drawn drafts, B 8")

case $part in
  check | 1)
    step machine 30 "${machine[@]}"
    step check 50 "$python" -m pagedtree check "${check[@]}" --json "${out}check.json"
    step wgmma 40 "${self_test[@]}"
    ;;&
  step) step whole $PART_SECONDS "$python" benchmarks/bench_step.py "${whole[@]}" --json "${out}step.json" ;;
  walk) by_wheel "${walk[@]}" ;;
  boxes) by_wheel "${boxes[@]}" ;;
  trace)
    ((rehearse)) || install "$prepared/variants/trace"
    PYTHONPATH=$prepared/variants/trace/site:$PYTHONPATH step trace 50 "$python" benchmarks/bench_ops.py "${bench[@]}" \
      --call-only --trace --rows "${traced[@]}"
    ;;
  1)
    export PAGEDTREE_ENGINE=wgmma
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
  real)
    if ((!rehearse)); then
      install "$prepared/text"
      (cd "$prepared/text" && cat "${prepared}_text"/part_* > "$(cut -c 67- SHA256)" && sha256sum -c SHA256) || exit 1
      export PYTHONPATH=$PYTHONPATH:$prepared/text/site:$prepared/text
    fi
    step real $PART_SECONDS "$python" benchmarks/bench_real.py "${real[@]}" --json "${out}real.json"
    ;;
  jetspec)
    step jetspec $PART_SECONDS "$python" "$prepared/jetspec/step.py" "$prepared/jetspec" "${jetspec[@]}" \
      --json "${out}jetspec.json"
    ;;
esac
exit $status
