// The recurrent ops have no kernels yet; each call says so.
#include <stdexcept>
#include <string>

#include "core/recurrent.h"
#include "cuda/backend.h"

namespace pagedtree::cuda {
namespace {

[[noreturn]] void refuse(const char* op, const char* backend) {
  throw std::runtime_error(std::string(op) + ": the backend " + backend + " does not have this op yet; cpu has it");
}

}  // namespace

void CudaBackend::tree_delta_rule(const DeltaRuleParams&, const ExecContext&) const { refuse("tree_delta_rule", name); }

void CudaBackend::advance_state(const DeltaRuleParams&, const ExecContext&) const { refuse("advance_state", name); }

void CudaBackend::tree_conv1d(const ConvParams&, const ExecContext&) const { refuse("tree_conv1d", name); }

void CudaBackend::advance_conv(const ConvParams&, const ExecContext&) const { refuse("advance_conv", name); }

}  // namespace pagedtree::cuda
