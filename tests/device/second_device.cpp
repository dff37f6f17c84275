// A second device whose memory is the host's, so that what is written for a GPU runs without one: its tensors are of
// another device than the CPU's, and mixing the two fails as it would there. Operations run on the CPU, on copies.
// It takes the place of a device type that torch knows and nobody here has.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::HPU;
std::atomic<int64_t> live{0}, peak{0};

// Faults that a test asks for: bytes that may be live at most (0: any), the allocation from now on that fails once (0: none), and
// the call from now on with which the device ends (0: none), after which all calls fail alike.
std::atomic<int64_t> cap{0}, failing{0}, ending{0}, calls{0};
std::atomic<bool> ended{false}, logging{false};
std::mutex log_mutex;
std::vector<std::string> log_of_calls;

void called(const char* what, int64_t nbytes) {
  calls++;
  if (logging) {
    std::lock_guard<std::mutex> guard(log_mutex);
    log_of_calls.push_back(std::string(what) + " " + std::to_string(nbytes));
  }
  if (ending > 0 && --ending == 0) ended = true;
  TORCH_CHECK(!ended, "CUDA error: an illegal memory access was encountered\nin a call of ", what);
}

struct Block {
  void* data;
  int64_t nbytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  live -= block->nbytes;
  std::free(block->data);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nbytes > 0) {
      called("allocate", nbytes);
      const bool fails = failing > 0 && --failing == 0;
      const bool full = cap > 0 && live + static_cast<int64_t>(nbytes) > cap;
      TORCH_CHECK_WITH(OutOfMemoryError, !fails && !full, "CUDA out of memory. Tried to allocate ", nbytes, " bytes");
    }
    if (nbytes > 0 && posix_memalign(&data, 512, nbytes) != 0)
      throw std::bad_alloc();
    auto* block = new Block{data, static_cast<int64_t>(nbytes)};
    live += block->nbytes;
    if (live > peak) peak = live.load();
    return {data, block, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

// Its one stream is the caller's thread: what is recorded has happened.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, 0));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(c10::Device(kDevice, 0)); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(HPU, Guard)

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace
namespace at {
REGISTER_HPU_HOOKS(HPUHooks)
}
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::HPU);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& x) {
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  called("copy", self.nbytes());
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) {
  called("item", self.nbytes());
  return at::cpu::_local_scalar_dense(on_cpu(self));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::cpu::view(self, size); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t numel = 1;
  for (auto n : size) numel *= n;
  auto* impl = self.unsafeGetTensorImpl();
  const size_t nbytes = (numel + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < nbytes) self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(allocator.allocate(nbytes));
  if (self.storage().nbytes() < nbytes) self.storage().unsafeGetStorageImpl()->set_nbytes(nbytes);
  impl->set_sizes_contiguous(size);
  return self;
}

// What torch calls for devices it knows little of; the CPU's own convolution is called by its usual name.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef out, int64_t groups) {
  std::optional<at::Tensor> bias;
  if (b.has_value() && b->defined()) bias = on_cpu(*b);
  return at::convolution(on_cpu(x), on_cpu(w), bias, stride, padding, dilation, transposed, out, groups).to(x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef out, int64_t groups, std::array<bool, 3> mask) {
  auto [a, b, c] = at::convolution_backward(on_cpu(dy), on_cpu(x), on_cpu(w), at::OptionalIntArrayRef(w.size(0)), stride,
                                            padding, dilation, transposed, out, groups, mask);
  auto there = [&](const at::Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {there(a), there(b), there(c)};
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::_reshape_alias(self, size, stride);
}

// Changes its running statistics without saying so in its schema, which the fallback goes by.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& b,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& var, bool training, double momentum, double eps) {
  auto maybe = [](const std::optional<at::Tensor>& t) {
    return t.has_value() && t->defined() ? std::optional<at::Tensor>(on_cpu(*t)) : std::nullopt;
  };
  auto [y, m, v] = at::native_batch_norm(on_cpu(x), maybe(w), maybe(b), maybe(mean), maybe(var), training, momentum, eps);
  return {y.to(x.device()), m.to(x.device()), v.to(x.device())};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("native_batch_norm", batch_norm);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastHPU, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastHPU, m) {
  KERNEL(at::kHPU, linear, lower_precision_fp)
  KERNEL(at::kHPU, mm, lower_precision_fp)
  KERNEL(at::kHPU, addmm, lower_precision_fp)
}

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY(second_device, m) {
  m.def("live() -> int", []() -> int64_t { return live; });
  m.def("peak() -> int", []() -> int64_t { return peak; });
  m.def("reset_peak() -> ()", []() { peak = live.load(); });
  m.def("calls() -> int", []() -> int64_t { return calls; });
  m.def("faults(int cap, int failing, int ending) -> ()", [](int64_t bytes, int64_t allocation, int64_t call) {
    cap = bytes, failing = allocation, ending = call, ended = false, calls = 0;
  });
  m.def("log(bool on) -> str[]", [](bool on) -> std::vector<std::string> {
    std::lock_guard<std::mutex> guard(log_mutex);
    logging = on;
    return std::exchange(log_of_calls, {});
  });
}
