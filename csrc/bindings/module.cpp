// pagedtree._C: what the op library cannot say through tensors. The ops do not need it.
#include <pybind11/pybind11.h>

#include "core/backend.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information of pagedtree";
  m.def("build_info", [] {
    py::dict info;
    info["version"] = PAGEDTREE_VERSION;
    info["compiler"] = __VERSION__;
    info["cuda"] = false;
    return info;
  });
}
