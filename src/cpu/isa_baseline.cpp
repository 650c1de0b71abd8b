#define STROBE_ISA baseline
#define STROBE_VECTOR_BYTES 16
#include "fma_table.h"
