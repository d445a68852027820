// C++ functions of torch that query the GPU, replaced by constants. fake_cuda.py compiles this file twice:
// with -DPRELOAD a library that is loaded before torch, and without it a library that is loaded after torch.
#ifdef PRELOAD

#include <cstdint>
#include <optional>

namespace c10 {
enum class DeviceType : int8_t { CUDA = 1 };
}

// Backward queries the accelerator, and a CPU build of torch has none. The first definition wins.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator

#else

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

// Device guard for one device and one stream. Nothing runs.
struct OneCard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream only() { return Stream(Stream::DEFAULT, card()); }
  static Device card() { return Device(DeviceType::CUDA, 0); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return card(); }
  Device exchangeDevice(Device) const override { return card(); }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  bool queryStream(const Stream&) const override { return true; }
  bool queryEvent(void*) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

static bool say_yes(void*) { return true; }
static DeviceIndex say_one(void*) { return 1; }

// Replace an entry in the virtual function table of torch's CUDA hooks. In the Itanium ABI a pointer to a virtual
// member is the offset of its slot plus one.
template <class Member, class Function>
static void override_hook(Member member, Function* function) {
  intptr_t offset = 0;
  std::memcpy(&offset, &member, sizeof(offset));
  auto table = *reinterpret_cast<char* const*>(&at::detail::getCUDAHooks());
  auto slot = reinterpret_cast<void**>(table + offset - 1);
  const intptr_t page = sysconf(_SC_PAGESIZE);
  mprotect(reinterpret_cast<void*>(reinterpret_cast<intptr_t>(slot) & -page), 2 * page, PROT_READ | PROT_WRITE);
  *slot = reinterpret_cast<void*>(function);
}

extern "C" void pretend() {
  static OneCard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  override_hook(&at::CUDAHooksInterface::hasCUDA, &say_yes);
  override_hook(&at::AcceleratorHooksInterface::hasPrimaryContext, &say_yes);
  override_hook(&at::AcceleratorHooksInterface::deviceCount, &say_one);
}

#endif
