# The cffi extension: lib holds what include/strobe/strobe.h and python/glue/glue.h declare.
from typing import Any

ffi: Any
lib: Any
