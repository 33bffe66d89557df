// The kernel table of one instruction set.
#include <type_traits>

#include "cpu/isa.h"
#include "cpu/isa/attention/kernels.h"

#define PT_STRING_(x) #x
#define PT_STRING(x) PT_STRING_(x)

// AMX serves only attention; its row kernels are another instruction set's.
// clang-format off
#define PT_EACH_ROW_KERNEL(X) \
  X(sample) X(token_logprobs) X(quantize_e4m3) X(rotate_heads) X(top_tokens) X(draw_children) \
  X(verify_sampled) PT_EACH_WALK(X, X) X(step_shard) X(reduce_shard) X(delta_rule) X(conv1d)
// clang-format on

namespace pagedtree::cpu::PAGEDTREE_ROWS_ISA {

#define PT_DECLARE(kernel, ...) std::remove_pointer_t<decltype(IsaKernels::kernel)> kernel;
PT_EACH_ROW_KERNEL(PT_DECLARE)

}  // namespace pagedtree::cpu::PAGEDTREE_ROWS_ISA

namespace pagedtree::cpu::PAGEDTREE_ISA {

const IsaKernels& kernels() {
#define PT_ENTRY(kernel, ...) .kernel = PAGEDTREE_ROWS_ISA::kernel,
  static constexpr IsaKernels table = {.name = PT_STRING(PAGEDTREE_ISA),
                                       .attend = attend,
                                       .merge_pieces = merge_pieces,
                                       .merge_states = merge_states,
                                       PT_EACH_ROW_KERNEL(PT_ENTRY)};
  return table;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
