// pagedtree._C: host decisions of `generate`, and build information that the op library cannot return as tensors. The
// ops do not need it.
#include "bindings/module.h"

#include <string>
#include <string_view>

#include "core/engine.h"
#include "cpu/isa.h"

namespace py = pybind11;

namespace {

py::list split(std::string_view text, char separator) {
  py::list parts;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    parts.append(py::str(std::string(text.substr(0, end))));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return parts;
}

py::dict build_info() {
  py::dict isas;  // name -> compiler flags
  for (const py::handle& isa : split(PAGEDTREE_ISAS, '|')) {
    const std::string text = py::cast<std::string>(isa);
    const size_t name_end = text.find(' ');
    isas[py::str(text.substr(0, name_end))] = name_end == std::string::npos ? "" : text.substr(name_end + 1);
  }
  py::dict info;
  info["version"] = PAGEDTREE_VERSION;
  info["compiler"] = PAGEDTREE_COMPILER;
  info["build_type"] = PAGEDTREE_BUILD_TYPE;
  info["torch_target"] = PAGEDTREE_TORCH_TARGET;
  info["cpu_isas"] = isas;
  const py::list architectures = split(PAGEDTREE_CUDA_ARCH_LIST, ' ');
  info["cuda"] = !architectures.empty();
  info["cuda_architectures"] = architectures;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What pagedtree decides on the host, and build information";
  pagedtree::bind_copied_text(m);
  pagedtree::bind_explain(m);
  pagedtree::bind_text_memory(m);
  m.def("build_info", &build_info, "What this build was made of: versions, instruction sets with their flags, CUDA.");
  m.def(
      "available_isas", [] { return split(pagedtree::cpu::available_isas(), ','); },
      "The CPU backend's instruction sets that this machine can run, best last.");
  m.def(
      "attention_engine", [] { return pagedtree::engine_name(pagedtree::engine_from_environment()); },
      "What attention is to multiply with on a GPU: PAGEDTREE_ENGINE, or \"auto\". Raises RuntimeError for other "
      "names.");
  m.def(
      "active_isa", [] { return pagedtree::cpu::isa_kernels().name; },
      "The one in use: the best, or that of PAGEDTREE_CPU_ISA. Raises RuntimeError where that one cannot run here.");
}
