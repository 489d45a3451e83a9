// A CUDA runtime without a GPU, just enough for torch's libc10_cuda.so to hand out memory:
// addresses count upwards from a fixed one, FAKE_CAPACITY bytes can be taken, and streams are
// always done. Physical memory for expandable segments (cuMemCreate, cuMemMap) counts alike.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

namespace {

uint64_t next_address = uint64_t{1} << 40;
uint64_t taken = 0;
std::map<uint64_t, uint64_t> segments;  // address -> bytes, of cudaMalloc
std::map<uint64_t, uint64_t> physical;  // handle -> bytes, of cuMemCreate

uint64_t capacity() {
  const char* text = std::getenv("FAKE_CAPACITY");
  return text == nullptr ? uint64_t{80} << 30 : std::strtoull(text, nullptr, 10);
}

uint64_t new_range(uint64_t nbytes) {
  const uint64_t step = uint64_t{2} << 20, address = next_address;
  next_address += (nbytes + step - 1) / step * step;
  return address;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp*,
                unsigned long long) {
  if (taken + nbytes > capacity()) return CUDA_ERROR_OUT_OF_MEMORY;
  static uint64_t last = 0;
  taken += nbytes;
  physical[*handle = ++last] = nbytes;
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  taken -= physical[handle];
  physical.erase(handle);
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* address, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  *address = new_range(nbytes);
  return CUDA_SUCCESS;
}
CUresult nothing() { return CUDA_SUCCESS; }
CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult error_string(CUresult, const char** text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** data, size_t nbytes) {
  if (taken + nbytes > capacity()) return cudaErrorMemoryAllocation;
  const uint64_t address = new_range(nbytes);
  segments[address] = nbytes;
  taken += nbytes;
  *data = reinterpret_cast<void*>(address);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  const auto found = segments.find(reinterpret_cast<uint64_t>(data));
  if (found == segments.end()) return cudaSuccess;
  taken -= found->second;
  segments.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = capacity();
  *free = *total - taken;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  if (!std::strcmp(name, "cuMemCreate"))
    *function = reinterpret_cast<void*>(&create);
  else if (!std::strcmp(name, "cuMemRelease"))
    *function = reinterpret_cast<void*>(&release);
  else if (!std::strcmp(name, "cuMemAddressReserve"))
    *function = reinterpret_cast<void*>(&reserve);
  else if (!std::strcmp(name, "cuDeviceGetAttribute"))
    *function = reinterpret_cast<void*>(&attribute);
  else if (!std::strcmp(name, "cuGetErrorString"))
    *function = reinterpret_cast<void*>(&error_string);
  else
    *function = reinterpret_cast<void*>(&nothing);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  properties->totalGlobalMem = capacity();
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  *least = *most = 0;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the fake runtime"; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }

}  // extern "C"

#define FAKE(name)                                     \
  extern "C" cudaError_t fake_##name() __asm__(#name); \
  extern "C" cudaError_t fake_##name() { return cudaSuccess; }
FAKE(cudaDeviceCanAccessPeer)
FAKE(cudaDeviceEnablePeerAccess)
FAKE(cudaDeviceGetDefaultMemPool)
FAKE(cudaDeviceSynchronize)
FAKE(cudaEventCreateWithFlags)
FAKE(cudaEventDestroy)
FAKE(cudaEventElapsedTime)
FAKE(cudaEventQuery)
FAKE(cudaEventRecord)
FAKE(cudaEventSynchronize)
FAKE(cudaFreeAsync)
FAKE(cudaGetLastError)
FAKE(cudaGraphNodeGetDependencies)
FAKE(cudaIpcCloseMemHandle)
FAKE(cudaIpcGetMemHandle)
FAKE(cudaIpcOpenMemHandle)
FAKE(cudaMallocAsync)
FAKE(cudaMemPoolGetAttribute)
FAKE(cudaMemPoolSetAccess)
FAKE(cudaMemPoolSetAttribute)
FAKE(cudaMemPoolTrimTo)
FAKE(cudaMemcpy)
FAKE(cudaMemcpyAsync)
FAKE(cudaMemcpyPeerAsync)
FAKE(cudaSetDevice)
FAKE(cudaStreamCreateWithPriority)
FAKE(cudaStreamGetCaptureInfo)
FAKE(cudaStreamQuery)
FAKE(cudaStreamSynchronize)
FAKE(cudaStreamWaitEvent)
FAKE(cudaThreadExchangeStreamCaptureMode)
