// Prints strobe_cuda_info().
#include <stdio.h>
#include <stdlib.h>

#include "strobe/strobe.h"

int main(void) {
  size_t needed = 0;
  if (strobe_cuda_info(NULL, 0, &needed) != STROBE_OK) return 1;
  char *text = malloc(needed);
  if (strobe_cuda_info(text, needed, NULL) != STROBE_OK) return 1;
  fputs(text, stdout);
  free(text);
  return 0;
}
