// Compares the table of fields (strobe/fields.inc) with strobe.h. The structs have no padding, so the sizes of the members in the rows must
// add up to the size of the struct. The enums refuse a row that occurs twice, because it could hide a missing row of the same size.
#include <cstddef>

#include "strobe/strobe.h"

// clang-format off
namespace {

namespace options { enum {
#define STROBE_OPTION(name) name,
#include "strobe/fields.inc"
}; }

namespace tensors { enum {
#define STROBE_TENSOR(name, place) name,
#include "strobe/fields.inc"
}; }

namespace part { enum {
#define STROBE_PART(name) name,
#include "strobe/fields.inc"
}; }

namespace execution { enum {
#define STROBE_EXECUTION(name) name,
#include "strobe/fields.inc"
}; }

namespace plan { enum {
#define STROBE_PLAN(name) name,
#include "strobe/fields.inc"
}; }

} // namespace

static_assert(sizeof(strobe_attention) == sizeof(strobe_attention::size)
#define STROBE_OPTION(name) + sizeof(strobe_attention::name)
#include "strobe/fields.inc"
, "strobe/fields.inc lacks a member of strobe_attention, or has one twice");

static_assert(sizeof(strobe_tensors) == sizeof(strobe_tensors::size)
#define STROBE_TENSOR(name, place) + sizeof(strobe_tensors::name)
#include "strobe/fields.inc"
, "strobe/fields.inc lacks a member of strobe_tensors, or has one twice");

static_assert(sizeof(strobe_addresses) == sizeof(strobe_addresses::size)
#define STROBE_TENSOR(name, place) + sizeof(strobe_addresses::name)
#include "strobe/fields.inc"
, "strobe/fields.inc lacks a member of strobe_addresses, or has one twice");

static_assert(sizeof(strobe_part) == sizeof(strobe_part::size)
#define STROBE_PART(name) + sizeof(strobe_part::name)
#include "strobe/fields.inc"
, "strobe/fields.inc lacks a member of strobe_part, or has one twice");

static_assert(sizeof(strobe_execution) == sizeof(strobe_execution::size)
#define STROBE_EXECUTION(name) + sizeof(strobe_execution::name)
#include "strobe/fields.inc"
, "strobe/fields.inc lacks a member of strobe_execution, or has one twice");

static_assert(sizeof(strobe_plan) == sizeof(strobe_plan::size)
#define STROBE_PLAN(name) + sizeof(strobe_plan::name)
#include "strobe/fields.inc"
, "strobe/fields.inc lacks a member of strobe_plan, or has one twice");

#define STROBE_TENSOR(name, place)                                                                                                         \
  static_assert(offsetof(strobe_tensors, name) == offsetof(strobe_addresses, name), #name " is elsewhere in strobe_addresses");
#include "strobe/fields.inc"
