// CUDA as far as shapes go: torch takes CUDA for present, with cuDNN, so that fake CUDA tensors, and autograd over them, choose
// the kernels that eager chooses on a GPU. Nothing computes. It must be loaded before torch's hooks are asked for first.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>

namespace {

constexpr auto kDevice = c10::DeviceType::CUDA;

// Its one stream is the caller's thread: what is recorded has happened.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91002; }
  long versionRuntimeCuDNN() const override { return 91002; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
};

// What the functions registered for cuDNN do, as far as the operation that they call: one with what only cuDNN knows left out.
at::Tensor layer(at::Tensor& hy, at::Tensor* cy, const at::Tensor& input, const at::Tensor& hx, const at::Tensor& cx,
                 at::TensorList weights, bool biases, int64_t mode, int64_t layers, double dropout, bool train, bool both,
                 bool batch_first) {
  const bool projects = cx.defined() && cx.size(2) != hx.size(2);
  const int64_t hidden = projects ? cx.size(2) : hx.size(2), projected = projects ? hx.size(2) : 0;
  const int64_t stride = (biases ? 4 : 2) + (projects ? 1 : 0);
  auto [output, h, c, reserve, packed] =
      at::_cudnn_rnn(input, weights, stride, input.new_empty({0}), hx, cx.defined() ? std::optional(cx) : std::nullopt, mode,
                     hidden, projected, layers, batch_first, dropout, train, both, {}, std::nullopt);
  hy = h;
  if (cy != nullptr) *cy = c;
  return output;
}

template <int64_t mode>
void one_state(at::Tensor& output, at::Tensor& hy, const at::Tensor& input, const at::Tensor& hx, at::TensorList weights,
               bool biases, int64_t layers, double dropout, bool train, bool both, bool batch_first) {
  output = layer(hy, nullptr, input, hx, {}, weights, biases, mode, layers, dropout, train, both, batch_first);
}

void two_states(at::Tensor& output, at::Tensor& hy, at::Tensor& cy, const at::Tensor& input, at::TensorList states,
          at::TensorList weights, bool biases, int64_t layers, double dropout, bool train, bool both, bool batch_first) {
  output = layer(hy, &cy, input, states[0], states[1], weights, biases, 2, layers, dropout, train, both, batch_first);
}

std::atomic<int64_t> attention{0};  // at::SDPBackend of the next one: math, flash, memory-efficient, cuDNN

int64_t choose(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
               std::optional<double>, bool) {
  return attention;
}

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
namespace native {
REGISTER_CUDA_DISPATCH(rnn_relu_cudnn_stub, &one_state<0>)
REGISTER_CUDA_DISPATCH(rnn_tanh_cudnn_stub, &one_state<1>)
REGISTER_CUDA_DISPATCH(gru_cudnn_stub, &one_state<3>)
REGISTER_CUDA_DISPATCH(lstm_cudnn_stub, &two_states)
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose)
}  // namespace native
}  // namespace at

TORCH_LIBRARY(cuda_shapes, m) {
  m.def("choose_attention(int backend) -> ()", [](int64_t backend) { attention = backend; });
}
