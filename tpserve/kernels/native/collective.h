// Ranks on one host that meet in memory which all of them have mapped (laid out by `tpserve/parallel/segment.py`).
//
// A meeting has a sequence number s, the same on all ranks. A rank puts its data into its slot, stores s in its flag, waits until
// every flag is at least s, and reads all slots, in rank order: the same bits on every rank in every run.
//
// Two sets of slots, used in turn, suffice. A rank writes to the set of s again in s + 2, after it saw every flag at s + 1; a
// rank raises its flag to s + 1 only when it has read the slots of s. So no reader is left in them.
#pragma once

#include <cstddef>
#include <cstdint>

struct Group {
  uint8_t* flags;   // one word per rank, `flag_stride` bytes apart
  uint8_t* slots;   // (2, size, capacity) bytes
  int64_t flag_stride;
  int64_t capacity;
  int64_t limit_ns;
  uint64_t sequence;  // of the last meeting
  int32_t rank;
  int32_t size;
};

uint8_t* next_slot(const Group&);     // where this rank's data for the next meeting goes
const uint8_t* slots(const Group&);   // all ranks' data of the last meeting, `capacity` bytes apart
void arrive(Group&);                  // this rank's data is there: the next meeting becomes the last one
bool all_arrived(const Group&);       // waits; false if some rank did not arrive within the limit

// Both return false as above. `gather`: `out` gets (size, bytes). `reduce`: x becomes its sum over the ranks.
bool gather(Group&, const void* x, int64_t bytes, void* out);
bool reduce(Group&, float* x, int64_t count);
