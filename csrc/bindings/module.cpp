// pagedtree._C: host decisions of `generate`, and build information that the op library cannot return as tensors. The
// ops do not need it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <vector>

#include "bindings/copied_text.h"
#include "bindings/explain.h"
#include "bindings/text_memory.h"
#include "bindings/tree_search.h"
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

void bind_drafts(py::module_& m) {
  m.def("copied_text", &pagedtree::copied_text, py::arg("tokens"), py::arg("lengths"), py::arg("offsets"),
        py::arg("parents"), py::arg("draft_tokens"), py::arg("longest"),
        "How much of the text in front of each guess is that of an earlier copy, and log-probabilities by that.");
  m.def("former_continuations", &pagedtree::former_continuations, py::arg("tokens"), py::arg("before"),
        py::arg("newest"), py::arg("oldest"), py::arg("end"), py::arg("context"), py::arg("max_ngram"),
        py::arg("length"), py::arg("most"), py::arg("max_places"),
        "What stands around the places where former texts end as a text does; see TextMemory.continuations.");
  m.def("best_tree", &pagedtree::best_tree, py::arg("levels"), py::arg("costs"), py::arg("level_cost"),
        "The parents of the tree with the most expected tokens per second; see pagedtree.choose_tree.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What pagedtree decides on the host, and build information";
  bind_drafts(m);
  m.def("build_info", &build_info, "What this build was made of: versions, instruction sets with their flags, CUDA.");
  m.def(
      "available_isas", [] { return split(pagedtree::cpu::available_isas(), ','); },
      "The CPU backend's instruction sets that this machine can run, best last.");
  m.def(
      "attention_engine", [] { return pagedtree::engine_name(pagedtree::engine_from_environment()); },
      "What attention is to multiply with on a GPU: PAGEDTREE_ENGINE, or \"auto\". Raises RuntimeError for other "
      "names.");
  m.def("explain_attention", &pagedtree::explain_attention, py::arg("query_lens"), py::arg("seq_lens"),
        py::arg("num_q_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("head_dim_v"), py::arg("latent"),
        py::arg("kv_bytes"), py::arg("max_seqlen_q"), py::arg("window"), py::arg("num_sms"),
        py::arg("max_shared_bytes"), py::arg("l2_bytes"), py::arg("engine"),
        "The CUDA kernel's tile and cuts for a batch; see pagedtree.explain.");
  m.def("attention_tiles", &pagedtree::attention_tiles, py::arg("engine"),
        "The CUDA kernels' tiles: (head_dim, head_dim_v) -> their rows, without those for latent caches alone.");
  m.attr("HEAD_DIMS") = pagedtree::head_dims();  // supported columns of K and V
  m.def(
      "active_isa", [] { return pagedtree::cpu::isa_kernels().name; },
      "The one in use: the best, or that of PAGEDTREE_CPU_ISA. Raises RuntimeError where that one cannot run here.");
}
