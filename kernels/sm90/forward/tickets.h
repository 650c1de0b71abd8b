// Tickets for free blocks: the numbers 0, 1, 2, ..., drawn from a counter that nothing has set to zero. A block draws until its number lies
// past the last item. The block that draws the very last number resets the counter, so that the next run of a captured graph can draw
// again. The memory's former contents are mistaken for a valid counter with a probability of 2^-96.
#pragma once
#include "../../ptx/atomic.h"
#include "../arguments.h"

namespace strobe::sm90 {

__device__ __forceinline__ u32 next_ticket(TicketCounter *tickets) { return fetch_add(&tickets->count, 1); }

// The first ticket of a block.
__device__ __forceinline__ u32 first_ticket(TicketCounter *tickets) {
  constexpr u64 kMark0 = 0x9E3779B9ull << 32, kMark1 = 0xF39CC0605CEDC834;
  u64 x[2] = {0, 0};
  while (x[0] >> 32 != kMark0 >> 32 || x[1] != kMark1) {
    if (compare_exchange(tickets, x, kMark0 | 1, kMark1)) return 0;
  }
  return next_ticket(tickets);
}
__device__ __forceinline__ void return_tickets(TicketCounter *tickets) { tickets->mark[0] = 0; }

} // namespace strobe::sm90
