#!/usr/bin/env bash
# Runs the op tests on a backend simt with ThreadSanitizer: every race between CUDA threads, in whatever order they run.
# Called by `make test-simt` after a build; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=build/cmake-$(python -c "import sys; print(sys.implementation.cache_tag)")
package=build/races/python/pagedtree
cmake --build "$tree" --parallel "${MAX_JOBS:-$(nproc)}" --target pagedtree_simt_tsan
rm -rf build/races
mkdir -p $package
cp -r python/pagedtree/. $package
cp "$tree/tsan/libpagedtree_simt.so" $package/lib

# Plans that are none, and padding that several tokens are moved to have several threads write one row: which one wins
# is nobody's promise. CuTe's witness is left out: single instructions, a minute each here, in which nothing can race.
overlapping=(--deselect tests/kernels/test_schedule.py::test_hostile_plans_come_to_an_end
  --deselect tests/adapters/test_sglang_trees.py::test_move_kv_cache_on_views)

# Each thread of a kernel takes several mappings of memory, together more than Linux allows a process by default.
if (($(sysctl -n vm.max_map_count) < 1000000)); then
  echo "run_races.sh: ThreadSanitizer may run out of mappings; as root: sysctl -w vm.max_map_count=1000000" >&2
fi

# As in run_sanitized.sh; Torch and Python are not instrumented and share nothing with the kernels' threads.
preload=$(for name in tsan stdc++; do c++ -print-file-name=lib$name.so; done | xargs)
status=0
env LD_PRELOAD="$preload" TSAN_OPTIONS="ignore_noninstrumented_modules=1:memory_limit_mb=4000:log_path=$PWD/build/races/report" \
  OMP_NUM_THREADS=1 PYTHONPATH=$PWD/build/races/python \
  python -m pytest -m "not slow and not stats" -o faulthandler_timeout=6000 -k simt \
  --ignore tests/kernels/test_simt.py --ignore tests/kernels/test_cute.py "${overlapping[@]}" "$@" || status=$?
cat build/races/report.* 2>/dev/null && status=1
exit $status
