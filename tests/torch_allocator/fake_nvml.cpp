// The management library, asked about links and other processes: there are none.
#define SUCCEEDS(name) \
  extern "C" int name() { return 0; }
#define UNSUPPORTED(name) \
  extern "C" int name() { return 3; }
SUCCEEDS(nvmlInit_v2)
SUCCEEDS(nvmlDeviceGetHandleByPciBusId_v2)
SUCCEEDS(nvmlDeviceGetComputeRunningProcesses)
UNSUPPORTED(nvmlDeviceGetGpuFabricInfoV)
UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlSystemGetCudaDriverVersion_v2)
