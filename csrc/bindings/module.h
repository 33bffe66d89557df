// The parts of pagedtree._C: each adds a file's functions.
#pragma once

#include <pybind11/pybind11.h>

namespace pagedtree {

namespace py = pybind11;

void bind_copied_text(py::module_& m);
void bind_explain(py::module_& m);
void bind_text_memory(py::module_& m);

}  // namespace pagedtree
