// A device "cuda" in host memory, to test the CUDA backend without a GPU: Torch's ops run as on the CPU, pagedtree's on
// simt. Like a real device it refuses ops over two devices, and host access without a copy.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

namespace at {

struct DeviceGenerator : CPUGeneratorImpl {
  DeviceGenerator() { place(DeviceType::CUDA); }
  void place(DeviceType type) { device_ = type == DeviceType::CUDA ? Device(type, 0) : Device(type); }
};

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<DeviceGenerator>(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace {

using c10::DataPtr;
using c10::DeviceType;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using c10::TensorImpl;
using torch::jit::Stack;

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA>);

const c10::Device kDevice(DeviceType::CUDA, 0);
const c10::Device kHost(DeviceType::CPU);

// Returns the memory as another device's storage; `from` stays alive.
DataPtr same_memory(const Storage& from, c10::Device device) {
  return {from.mutable_data(), new Storage(from), [](void* held) { delete static_cast<Storage*>(held); }, device};
}

at::Tensor tensor_over(Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Storage storage_over(const Storage& from, c10::Device device) {
  return Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), from.nbytes(),
                                                  same_memory(from, device), at::getCPUAllocator(), true));
}

// A call of a Torch op with tensors on the device.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const size_t arguments = op_.schema().arguments().size();
    const size_t first = stack_->size() - arguments;
    first_is_ours_ = (*stack_)[first].isTensor() && (*stack_)[first].toTensor().is_cuda();
    for (size_t i = first; i < stack_->size(); ++i) take((*stack_)[i]);
    refuse_two_devices();
    if (generator_ != nullptr) generator_->place(DeviceType::CPU);
    op_.callBoxed(stack_);
    if (generator_ != nullptr) generator_->place(DeviceType::CUDA);
    for (auto& [on_device, on_host] : pairs_) follow(on_device, on_host);
    const size_t returns = op_.schema().returns().size();
    for (size_t i = stack_->size() - returns; i < stack_->size(); ++i)
      replace((*stack_)[i], [&](const at::Tensor& t) { return on_device(t); });
  }

 private:
  // Replaces a tensor, or each of a list, by `change` of it; false for other values.
  template <typename Change>
  static bool replace(IValue& value, Change change) {
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(change(t));
      value = list;
    } else {
      return false;
    }
    return true;
  }

  void take(IValue& value) {
    if (replace(value, [&](const at::Tensor& t) { return on_host(t); })) return;
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
        list.push_back(t.has_value() ? std::optional(on_host(*t)) : t);
      value = list;
    } else if (value.isGenerator()) {
      generator_ = dynamic_cast<at::DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl());
      TORCH_CHECK(generator_ != nullptr, "Expected a 'cuda' device type for generator but found 'cpu'");
    } else if (value.isStorage()) {
      value = storage_over(value.toStorage(), kHost);
    } else if (value.isDevice()) {
      named_ = value.toDevice().type();
      value = kHost;
    }
  }

  at::Tensor on_host(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      others_.push_back(t);
      return t;
    }
    pairs_.emplace_back(t, tensor_over(storage_over(t.storage(), kHost), c10::DispatchKey::CPU, t));
    return pairs_.back().second;
  }

  void refuse_two_devices() const {
    static const std::set<std::string> takes_host_indices{"aten::index", "aten::_index_put_impl_"};
    const std::string& name = op_.schema().name();
    if (pairs_.empty() || name == "aten::copy_") return;
    if (takes_host_indices.count(name) > 0 && first_is_ours_) return;
    for (const at::Tensor& t : others_) {
      TORCH_CHECK(t.dim() == 0, name, ": expected all tensors to be on the same device, got cuda:0 and ", t.device());
    }
  }

  // Repeats an op's changes of sizes and storage (out=, resize_).
  static void follow(const at::Tensor& on_device, const at::Tensor& on_host) {
    StorageImpl* storage = on_device.storage().unsafeGetStorageImpl();
    if (on_host.storage().data() != storage->data()) {
      storage->set_data_ptr_noswap(same_memory(on_host.storage(), kDevice));
    }
    storage->set_nbytes(on_host.storage().nbytes());
    TensorImpl* impl = on_device.unsafeGetTensorImpl();
    if (on_host.sizes() != on_device.sizes() || on_host.strides() != on_device.strides()) {
      impl->set_sizes_and_strides(on_host.sizes(), on_host.strides(), on_host.storage_offset());
    }
  }

  at::Tensor on_device(const at::Tensor& t) const {
    if (!t.defined()) return t;
    for (const auto& [ours, on_host] : pairs_) {
      if (on_host.is_same(t)) return ours;
    }
    for (const at::Tensor& other : others_) {
      if (other.is_same(t)) return t;
    }
    if (named_.value_or(DeviceType::CUDA) != DeviceType::CUDA) return t;
    for (const auto& [ours, on_host] : pairs_) {
      if (t.storage().data() != nullptr && t.storage().data() == on_host.storage().data()) {  // a view
        const c10::InferenceMode as_its_base(ours.is_inference());
        return tensor_over(ours.storage(), c10::DispatchKey::CUDA, t);
      }
    }
    return tensor_over(storage_over(t.storage(), kDevice), c10::DispatchKey::CUDA, t);
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // on device and host, over one memory
  std::vector<at::Tensor> others_;                        // arguments on the host
  at::DeviceGenerator* generator_ = nullptr;
  bool first_is_ours_ = false;
  std::optional<DeviceType> named_;  // by an argument `device`
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  HostCall(op, stack).run();
}

// Torch registers it once for all devices; its kernel dispatches by device.
TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

}  // namespace

// Stands for a Torch with CUDA (csrc/torch/dispatch.cpp).
extern "C" __attribute__((visibility("default"))) int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
