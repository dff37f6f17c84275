// A second device that behaves as a GPU does, so that what is written for one runs without one: its tensors are of another
// device than the CPU's, the host cannot read their memory, and operations are done later, by streams (streams.py, launches.py).
// It takes the place of a device type that torch knows and nobody here has.
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::HPU;
std::atomic<int64_t> live{0}, peak{0};

std::atomic<int64_t> cap{1 << 30}, failing_allocation{0};

// Addresses that tensors have, which nobody can read, and at the same distance the bytes that streams read and write.
constexpr size_t kReserved = size_t{1} << 36;
char* reserve(int protection) {
  void* at = mmap(nullptr, kReserved, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(at);
}
char* const kAddresses = reserve(PROT_NONE);
char* const kBytes = reserve(PROT_READ | PROT_WRITE);

struct Block {
  char* data;
  int64_t nbytes;  // as asked for
  size_t rounded;
};

// What is freed is given out again at once, whatever streams still do with it, as a GPU's allocator does on one stream.
std::mutex mutex;
std::map<size_t, std::vector<char*>> unused;
size_t next = 0;
std::map<int64_t, int64_t> pinned;  // what the host has registered, from where to where

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  live -= block->nbytes;
  if (block->data) {
    std::lock_guard<std::mutex> lock(mutex);
    unused[block->rounded].push_back(block->data);
  }
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const bool fails = nbytes > 0 && failing_allocation > 0 && --failing_allocation == 0;
    TORCH_CHECK_WITH(OutOfMemoryError, !fails && live + static_cast<int64_t>(nbytes) <= cap, "second device out of memory. Tried to allocate ",
                     nbytes, " bytes, ", live.load(), " of ", cap.load(), " are allocated");
    const size_t rounded = (nbytes + 511) / 512 * 512;
    char* data = nullptr;
    if (nbytes > 0) {
      std::lock_guard<std::mutex> lock(mutex);
      auto& same = unused[rounded];
      if (same.empty()) {
        TORCH_CHECK(next + rounded <= kReserved, "second device out of addresses");
        data = kAddresses + next;
        next += rounded;
      } else {
        data = same.back();
        same.pop_back();
      }
    }
    auto* block = new Block{data, static_cast<int64_t>(nbytes), rounded};
    live += block->nbytes;
    if (live > peak) peak = live.load();
    return {data, block, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    TORCH_CHECK(false, "the host cannot copy the second device's memory");
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

// For torch's own autograd there is one stream; Python knows the others.
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
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    const auto at = reinterpret_cast<int64_t>(data);
    auto after = pinned.upper_bound(at);
    return after != pinned.begin() && at < std::prev(after)->second;
  }
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

// The bytes behind a tensor, as one of the CPU's that holds nothing: what frees its storage does not wait for who uses them.
at::Tensor bytes(const at::Tensor& x) {
  auto* at = static_cast<char*>(x.storage().mutable_data());
  if (x.device().type() == kDevice && at) at = kBytes + (at - kAddresses);
  if (at) at += x.storage_offset() * x.element_size();
  return at::from_blob(at, x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
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

// Asked before there is a tensor that Python could be called with: attention in plain operations (SDPBackend::math).
int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return 0;
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::_reshape_alias(self, size, stride);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("_fused_sdp_choice", attention);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

TORCH_LIBRARY_IMPL(_, AutocastHPU, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastHPU, m) {
  KERNEL(at::kHPU, linear, lower_precision_fp)
  KERNEL(at::kHPU, mm, lower_precision_fp)
  KERNEL(at::kHPU, addmm, lower_precision_fp)
}

TORCH_LIBRARY(second_device, m) {
  m.def("live() -> int", []() -> int64_t { return live; });
  m.def("peak() -> int", []() -> int64_t { return peak; });
  m.def("reset_peak() -> ()", []() { peak = live.load(); });
  m.def("bytes(Tensor x) -> Tensor", &bytes);
  m.def("cap() -> int", []() -> int64_t { return cap; });
  m.def("set_cap(int nbytes) -> ()", [](int64_t nbytes) { cap = nbytes; });
  // Returns how many allocations from now the last one told to fail would have been; 0 where it has failed.
  m.def("fail_allocation(int number) -> int", [](int64_t number) -> int64_t { return failing_allocation.exchange(number); });
  m.def("pin(int address, int nbytes) -> ()", [](int64_t at, int64_t nbytes) {
    at::globalContext().lazyInitDevice(at::kHPU);  // before, torch takes no memory for pinned
    std::lock_guard<std::mutex> lock(mutex);
    pinned[at] = at + nbytes;
  });
  m.def("unpin(int address) -> ()", [](int64_t at) {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(at);
  });
}
