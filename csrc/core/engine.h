// The names of engines, and the one that the environment asks for.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "core/attention.h"

namespace pagedtree {

constexpr const char* engine_name(MatrixEngine engine) { return engine == MatrixEngine::kWgmma ? "wgmma" : "mma.sync"; }

inline MatrixEngine engine_named(const std::string& name, const std::string& asked_by) {
  for (const MatrixEngine engine : {MatrixEngine::kMmaSync, MatrixEngine::kWgmma}) {
    if (name == engine_name(engine)) return engine;
  }
  throw std::runtime_error(asked_by + " must be mma.sync or wgmma, got " + name);
}

// What PAGEDTREE_ENGINE names, mma.sync if it is not set; read at each call.
inline MatrixEngine engine_from_environment() {
  const char* name = std::getenv("PAGEDTREE_ENGINE");
  return name == nullptr || *name == '\0' ? MatrixEngine::kMmaSync : engine_named(name, "PAGEDTREE_ENGINE");
}

}  // namespace pagedtree
