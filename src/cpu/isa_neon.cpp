#define STROBE_ISA neon
#define STROBE_VECTOR_BYTES 16
#include "fma_table.h"
