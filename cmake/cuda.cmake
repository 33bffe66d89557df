# The CUDA backend, compiled by nvcc; and the same sources for simt, compiled for the CPU.

set(PAGEDTREE_CUDA_SOURCES
  csrc/cuda/attention/attention.cu
  csrc/cuda/attention/bfloat16.cu
  csrc/cuda/attention/bfloat16_float8.cu
  csrc/cuda/attention/half.cu
  csrc/cuda/attention/half_float8.cu
  csrc/cuda/attention/merge_states.cu
  csrc/cuda/attention/plain.cu
  csrc/cuda/backend.cu
  csrc/cuda/drafting/best_first.cu
  csrc/cuda/drafting/growth.cu
  csrc/cuda/drafting/ngram.cu
  csrc/cuda/drafting/packing.cu
  csrc/cuda/drafting/proposers.cu
  csrc/cuda/drafting/select_nodes.cu
  csrc/cuda/engine.cu
  csrc/cuda/instructions.cu
  csrc/cuda/kv_cache.cu
  csrc/cuda/logits/logprobs.cu
  csrc/cuda/recurrent/conv1d.cu
  csrc/cuda/recurrent/delta_rule.cu
  csrc/cuda/logits/sampling.cu
  csrc/cuda/rules.cu
  csrc/cuda/trees.cu
  csrc/cuda/verify/rules.cu
  csrc/cuda/verify/sampled.cu
  csrc/cuda/verify/shards.cu
)
# For Hopper alone: wgmma and TMA.
set(PAGEDTREE_SM90_SOURCES
  csrc/cuda/attention/bfloat16_float8_sm90.cu
  csrc/cuda/attention/bfloat16_sm90.cu
  csrc/cuda/attention/half_float8_sm90.cu
  csrc/cuda/attention/half_sm90.cu
  csrc/cuda/drafting/growth_sm90.cu
  csrc/cuda/instructions_sm90.cu
  csrc/cuda/logits/sampling_sm90.cu
  csrc/cuda/verify/rules_sm90.cu
  csrc/cuda/verify/sampled_sm90.cu
)

# ---- toolkit

find_program(PAGEDTREE_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)
if(PAGEDTREE_NVCC)
  file(REAL_PATH "${PAGEDTREE_NVCC}" nvcc)
  cmake_path(GET nvcc PARENT_PATH nvcc)
  cmake_path(GET nvcc PARENT_PATH toolkit)
endif()

# "8.0+PTX 9.0a" as CMake writes it, 80;90a-real, and the items of which it was made. Those below 8.0 are left out:
# containers preset lists that have them.
function(pagedtree_cuda_architectures list result kept_items)
  string(REGEX REPLACE "[ ,;]+" ";" list "${list}")
  set(found)
  set(kept)
  set(too_old)
  foreach(architecture IN LISTS list)
    if(NOT architecture MATCHES "^[0-9]+\\.[0-9][af]?(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: expected items such as 8.0, 9.0a or 8.0+PTX, got ${architecture}")
    endif()
    string(REGEX MATCH "^[0-9]+" major "${architecture}")
    if(major LESS 8)
      list(APPEND too_old "${architecture}")
      continue()
    endif()
    list(APPEND kept "${architecture}")
    string(REPLACE "." "" number "${architecture}")
    if(number MATCHES "\\+PTX$")
      string(REPLACE "+PTX" "" number "${number}")
      list(APPEND found "${number}")
    else()
      list(APPEND found "${number}-real")
    endif()
  endforeach()
  if(too_old AND NOT kept)
    message(FATAL_ERROR "The CUDA kernels need compute capability 8.0 or later; TORCH_CUDA_ARCH_LIST, or the GPU that is "
      "present, has ${too_old} only. Add 8.0 or a later one, or set PAGEDTREE_CUDA=0 to build without CUDA.")
  elseif(too_old)
    message(WARNING "The CUDA kernels need compute capability 8.0 or later: left out of the build: ${too_old}")
  endif()
  set(${result} "${found}" PARENT_SCOPE)
  set(${kept_items} "${kept}" PARENT_SCOPE)
endfunction()

# What the build is for: TORCH_CUDA_ARCH_LIST, else the GPU that is present, else Ampere and Hopper, whose PTX later GPUs
# translate.
function(pagedtree_choose_architectures result)
  set(list "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(list STREQUAL "")
    find_program(nvidia_smi nvidia-smi NO_CACHE)
    if(nvidia_smi)
      execute_process(COMMAND "${nvidia_smi}" --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE present OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
      if(NOT failed AND present MATCHES "^[0-9]+\\.[0-9]")
        string(REGEX REPLACE "[ \n]+" ";" list "${present}")
        list(REMOVE_DUPLICATES list)
        string(REPLACE "9.0" "9.0a" list "${list}")
      endif()
    endif()
  endif()
  if(list STREQUAL "")
    set(list "8.0;9.0+PTX;9.0a")
  endif()
  pagedtree_cuda_architectures("${list}" found list)
  string(REPLACE ";" " " list "${list}")
  set(PAGEDTREE_CUDA_ARCH_LIST "${list}" PARENT_SCOPE)
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# ---- CUDA

option(PAGEDTREE_TRAP_SPINS "For debugging on Hopper: a wait of 2^26 turns on an mbarrier ends the kernel with an error" OFF)
set(PAGEDTREE_CUDA_ARCH_LIST "")
if(DEFINED ENV{PAGEDTREE_CUDA} AND NOT "$ENV{PAGEDTREE_CUDA}")
  set(PAGEDTREE_CUDA_STATE "not built: PAGEDTREE_CUDA=$ENV{PAGEDTREE_CUDA}")
elseif(NOT PAGEDTREE_NVCC)
  set(PAGEDTREE_CUDA_STATE "not built: no nvcc on the PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin")
else()
  if(CMAKE_VERSION VERSION_LESS 3.25.2)
    message(FATAL_ERROR "The CUDA kernels need CMake 3.25.2 or later, the first that knows C++20 of nvcc 12 and 13; this is "
      "${CMAKE_VERSION} (${CMAKE_COMMAND}). Install a newer one, such as by pip install cmake, or set PAGEDTREE_CUDA=0 to "
      "build without CUDA.")
  endif()
  pagedtree_choose_architectures(CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_COMPILER "${PAGEDTREE_NVCC}")
  enable_language(CUDA)
  set(PAGEDTREE_CUDA_STATE "${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${PAGEDTREE_CUDA_ARCH_LIST}")
  add_library(pagedtree_cuda SHARED ${PAGEDTREE_CUDA_SOURCES})
  add_library(pagedtree::cuda ALIAS pagedtree_cuda)
  set_target_properties(pagedtree_cuda PROPERTIES
    EXPORT_NAME cuda CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
    CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(pagedtree_cuda PUBLIC
    $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/csrc>
    $<INSTALL_INTERFACE:include> $<INSTALL_INTERFACE:include/pagedtree>)
  # As -ffp-contract=off: a product and a sum are one operation only where the code says fma.
  set(cuda_flags -fmad=false --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter)
  # Drivers that nvcc 13 needs anyway know the better way. Without, nvcc 13 compresses in a thirtieth of the time, to
  # four times the size.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
    list(APPEND cuda_flags -Xfatbin=-compress-all)
  elseif(PAGEDTREE_SMALL)
    list(APPEND cuda_flags --compress-mode=size)
  endif()
  if(PAGEDTREE_TRAP_SPINS)
    list(APPEND cuda_flags -DPAGEDTREE_TRAP_SPINS)
  endif()
  target_compile_options(pagedtree_cuda PRIVATE ${cuda_flags})
  set(sm90_architectures ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER sm90_architectures INCLUDE REGEX "^90a")
  # Code for 9.0 serves Hopper, too, so that only what needs 9.0a is compiled for both.
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90(-real)?(;|$)")
    set(architectures ${CMAKE_CUDA_ARCHITECTURES})
    list(FILTER architectures EXCLUDE REGEX "^90a")
    set_target_properties(pagedtree_cuda PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  endif()
  if(sm90_architectures)
    add_library(pagedtree_cuda_sm90 OBJECT ${PAGEDTREE_SM90_SOURCES})
    set_target_properties(pagedtree_cuda_sm90 PROPERTIES
      CUDA_ARCHITECTURES "${sm90_architectures}" CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
      CUDA_VISIBILITY_PRESET hidden)
    target_include_directories(pagedtree_cuda_sm90 PRIVATE csrc)
    target_compile_options(pagedtree_cuda_sm90 PRIVATE ${cuda_flags})
    target_sources(pagedtree_cuda PRIVATE $<TARGET_OBJECTS:pagedtree_cuda_sm90>)
    target_compile_definitions(pagedtree_cuda PRIVATE PAGEDTREE_HAS_SM90A)
    target_compile_definitions(pagedtree_cuda_sm90 PRIVATE PAGEDTREE_HAS_SM90A)
  endif()
  target_link_options(pagedtree_cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,--build-id)
  install(TARGETS pagedtree_cuda EXPORT pagedtree LIBRARY DESTINATION lib)
endif()

# ---- simt

if(PAGEDTREE_SIMT)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    message(FATAL_ERROR "PAGEDTREE_SIMT needs an x86-64 processor: its fibers are switched in assembly")
  endif()
  # The toolkit's, else those of the wheels in requirements-dev.txt.
  if(Python_EXECUTABLE)
    execute_process(COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
      OUTPUT_VARIABLE purelib OUTPUT_STRIP_TRAILING_WHITESPACE)
    file(GLOB wheels "${purelib}/nvidia/cu*/include")
  endif()
  find_path(PAGEDTREE_CUDA_HEADERS nv/target
    HINTS "${toolkit}/include" "$ENV{CUDA_HOME}/include" /usr/local/cuda/include ${wheels} PATH_SUFFIXES . cccl)
  find_path(PAGEDTREE_CUDA_FLOAT_HEADERS cuda_fp8.h
    HINTS "${toolkit}/include" "$ENV{CUDA_HOME}/include" /usr/local/cuda/include ${wheels})
  if(NOT PAGEDTREE_CUDA_HEADERS OR NOT PAGEDTREE_CUDA_FLOAT_HEADERS)
    message(FATAL_ERROR "PAGEDTREE_SIMT needs the headers of the CUDA toolkit (cuda_fp16.h, cuda_bf16.h, cuda_fp8.h): "
      "put nvcc on the PATH, set CUDA_HOME, or pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl")
  endif()
  set(PAGEDTREE_SIMT_SOURCES
    csrc/simt/fiber.cpp
    csrc/simt/machine.cpp
    csrc/simt/ptx_simt.cpp
    csrc/simt/ptx_sm90_simt.cpp
  )
  # Attributes and pragmas of nvcc mean nothing to the host compiler. GCC notes that arguments as aligned as tensor maps
  # were once passed in another way.
  set(simt_flags ${PAGEDTREE_WARNINGS} -Wno-unknown-pragmas -Wno-attributes -Wno-psabi)
  set(simt_headers "${PAGEDTREE_CUDA_FLOAT_HEADERS}" "${PAGEDTREE_CUDA_HEADERS}")
  # A source has one language in a directory, so the kernels come in through files that include them.
  foreach(source IN LISTS PAGEDTREE_CUDA_SOURCES PAGEDTREE_SM90_SOURCES)
    string(REPLACE "csrc/cuda/" "simt/" wrapper "${source}.cpp")
    string(REPLACE "csrc/" "" included "${source}")
    file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/${wrapper}" CONTENT "#include \"${included}\"\n")
    list(APPEND PAGEDTREE_SIMT_KERNELS "${CMAKE_CURRENT_BINARY_DIR}/${wrapper}")
  endforeach()
  # Most of the time goes into the machine: kernels are compiled for a short build.
  set_source_files_properties(${PAGEDTREE_SIMT_KERNELS} PROPERTIES COMPILE_OPTIONS "-O1;-finline-small-functions")
  function(pagedtree_compile_for_simt target)
    target_include_directories(${target} PRIVATE csrc)
    target_include_directories(${target} SYSTEM PRIVATE ${simt_headers})
    target_compile_definitions(${target} PRIVATE PAGEDTREE_HAS_SM90A)
    target_compile_options(${target} PRIVATE ${simt_flags} ${ARGN})
    target_link_options(${target} PRIVATE ${ARGN})
  endfunction()

  add_library(pagedtree_simt SHARED ${PAGEDTREE_SIMT_KERNELS} ${PAGEDTREE_SIMT_SOURCES})
  pagedtree_compile_for_simt(pagedtree_simt)
  target_link_options(pagedtree_simt PRIVATE -Wl,--build-id)
  install(TARGETS pagedtree_simt LIBRARY DESTINATION lib)

  # The same with ThreadSanitizer, for tests/run_races.sh.
  set(tsan_flags -O1 -g -fsanitize=thread)
  add_library(pagedtree_simt_tsan SHARED EXCLUDE_FROM_ALL ${PAGEDTREE_SIMT_KERNELS} ${PAGEDTREE_SIMT_SOURCES})
  pagedtree_compile_for_simt(pagedtree_simt_tsan ${tsan_flags})
  set_target_properties(pagedtree_simt_tsan PROPERTIES
    OUTPUT_NAME pagedtree_simt LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/tsan")

  # What simt finds, shown on planted bugs: plain, and (make test-simt) with each sanitizer.
  function(pagedtree_add_selftest name)
    add_executable(${name} EXCLUDE_FROM_ALL tests/simt/selftest.cpp ${PAGEDTREE_SIMT_SOURCES})
    pagedtree_compile_for_simt(${name} ${ARGN})
  endfunction()
  pagedtree_add_selftest(simt_selftest)
  pagedtree_add_selftest(simt_selftest_asan -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined)
  pagedtree_add_selftest(simt_selftest_tsan ${tsan_flags})
  set_target_properties(simt_selftest PROPERTIES EXCLUDE_FROM_ALL OFF)

  # The host code of the CUDA backend over a runtime that writes down what it is asked, for tests/support/recorded.py. It
  # links only if the objects need no function of the runtime but those.
  if(TARGET pagedtree_cuda)
    add_library(pagedtree_recorded SHARED tests/runtime/recorded.cpp
      $<FILTER:$<TARGET_OBJECTS:pagedtree_cuda>,EXCLUDE,/backend\\.cu\\.>)
    target_include_directories(pagedtree_recorded PRIVATE csrc)
    target_include_directories(pagedtree_recorded SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    target_compile_options(pagedtree_recorded PRIVATE ${PAGEDTREE_WARNINGS} -O1)
    target_link_options(pagedtree_recorded PRIVATE -Wl,-z,defs -Wl,--build-id)
    if(TARGET pagedtree_cuda_sm90)
      target_sources(pagedtree_recorded PRIVATE $<TARGET_OBJECTS:pagedtree_cuda_sm90>)
    endif()
  endif()
endif()
