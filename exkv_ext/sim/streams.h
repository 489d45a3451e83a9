// Streams that lag: copies that a side stream is given wait in its queue until somebody waits for
// them, so that whoever reads too early, or frees memory that a copy still needs, is found out.
// Without EXKV_SIM_LAG every copy is done when it returns.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace exkv::sim {

void set_lag(bool on);
bool lags();

// Queues the copy of memory that does not move, if the current stream of the device is a side
// stream; false where it must be done at once.
bool queue_copy(c10::DeviceIndex index, void* to, const void* from, size_t nbytes);

// How many copies a stream has been given; all of them up to a number, done.
int64_t given(const c10::Stream& stream);
void finish(const c10::Stream& stream, int64_t number);
void finish_device(c10::DeviceIndex index);

// A stream that uses the memory of a block that may be freed before it has: as record_stream.
void record_use(const void* data, c10::StreamId stream);

// Memory that is freed now. A queued copy that needs it is done if its stream's use was recorded;
// else it is dropped, as if the memory were another's already, and counts as an error.
void memory_freed(const void* data, size_t nbytes);
int64_t lifetime_errors();

}  // namespace exkv::sim
