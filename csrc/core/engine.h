// Names of the matrix engines, and the environment's choice.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "core/attention.h"

namespace pagedtree {

constexpr int kWgmmaSharedBytes = 227 << 10;  // limit per CTA on Hopper

constexpr const char* engine_name(MatrixEngine engine) {
  switch (engine) {
    case MatrixEngine::kMmaSync:
      return "mma.sync";
    case MatrixEngine::kWgmma:
      return "wgmma";
    case MatrixEngine::kAuto:
      return "auto";
  }
  return "?";
}

// Raises an error that begins with `refusal` for other names.
inline MatrixEngine engine_named(const std::string& name, const std::string& refusal) {
  for (const MatrixEngine engine : {MatrixEngine::kMmaSync, MatrixEngine::kWgmma}) {
    if (name == engine_name(engine)) return engine;
  }
  throw std::runtime_error(refusal + ", got " + name);
}

// Returns the engine named by PAGEDTREE_ENGINE, read at each call; auto if unset.
inline MatrixEngine engine_from_environment() {
  const char* set = std::getenv("PAGEDTREE_ENGINE");
  const std::string name = set == nullptr ? "" : set;
  if (name.empty() || name == engine_name(MatrixEngine::kAuto)) return MatrixEngine::kAuto;
  return engine_named(name, "PAGEDTREE_ENGINE: expected auto, mma.sync or wgmma");
}

}  // namespace pagedtree
