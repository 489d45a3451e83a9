// Random generators of a simulated device: a CPU generator under another device's name, so that
// the same seed gives the same numbers as on the CPU.
#pragma once

#include <ATen/core/Generator.h>

namespace exkv::sim {

// A generator of its own with the default seed.
at::Generator new_generator(c10::DeviceIndex index);

// The device's default generator, which is the CPU's: torch.manual_seed seeds both at once.
const at::Generator& default_generator(c10::DeviceIndex index);

// The CPU generator inside; throws for a generator that is not of a simulated device.
at::Generator host_generator(const at::Generator& generator);

}  // namespace exkv::sim
