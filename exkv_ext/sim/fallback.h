// How every op runs on a simulated device: the CPU kernel on aliases of the device's memory.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace exkv::sim {

// Registers the fallback for each op that has a CPU kernel of its own and none for this backend;
// returns how many were new. Without this, an op that also has a decomposition would take it, and
// differ from the CPU in rounding and in memory. Call it again after registering further kernels.
// The ops `in_parts` are left out, since their parts are to run instead. `known_texts` says of ops
// whose kernels know some texts only, e.g. names of formats, which: a call with another one runs
// the op's reference (`<name>_reference`) on the device.
int64_t mirror_ops(const std::set<std::string>& in_parts,
                   const std::map<std::string, std::set<std::string>>& known_texts);

}  // namespace exkv::sim
