#!/usr/bin/env bash
# Builds the native part with AddressSanitizer and UndefinedBehaviorSanitizer and runs the op tests on it.
# Called by `make test-sanitizers`; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=build/sanitizers
package=$tree/python/pagedtree
PAGEDTREE_CUDA=0 cmake -S . -B $tree -G Ninja -DPAGEDTREE_SANITIZE=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DPAGEDTREE_SIMT=ON -DPython_EXECUTABLE="$(command -v python)"
cmake --build $tree --parallel "${MAX_JOBS:-$(nproc)}"
rm -rf $tree/python $tree/report.*
mkdir -p $package && cp -r python/pagedtree/. $package
cmake --install $tree --prefix $package

# What needs no native code, or calls the ops as the other tests do, with torch's models around them, or measures memory,
# which AddressSanitizer keeps; below, a planted crash, which it reports.
elsewhere=(tests/adapters/test_{architectures,custom_generate,importers,transformers_attention}.py
  tests/generation/test_{generate_arguments,generate_rules,generate_stops,tree_tuner}.py
  tests/kernels/test_sass.py tests/ops/test_memory_growth.py
  tests/repo/test_{benchmarks,cli,docs,examples,gpu_run,layout,packaging}.py)

# Python lacks the sanitizers' runtime, so it comes by preload; libstdc++ with it, or exceptions are not followed.
# A dying worker's reports: ASan's go to files, UBSan's to stderr by --capture=sys. Python itself leaks by design.
preload=$(for name in asan ubsan stdc++; do c++ -print-file-name=lib$name.so; done | xargs)
options="halt_on_error=1:log_path=$PWD/$tree/report"
status=0
env LD_PRELOAD="$preload" ASAN_OPTIONS="$options:detect_leaks=0:allocator_may_return_null=1" UBSAN_OPTIONS="$options:print_stacktrace=1" \
  OMP_NUM_THREADS=1 PYTHONPATH=$PWD/$tree/python python -m pytest -m "not slow and not stats" -o faulthandler_timeout=3000 \
  --capture=sys --deselect "tests/kernels/test_engine.py::test_each_end_of_the_process_is_told[a crash]" \
  "${elsewhere[@]/#/--ignore=}" "$@" || status=$?
# A forked worker that unwinds a stack unknown to AddressSanitizer makes it warn, which is no finding.
for report in $(grep -lE "ERROR: |runtime error: " $tree/report.* 2> /dev/null); do
  cat "$report"
  status=1
done
exit $status
