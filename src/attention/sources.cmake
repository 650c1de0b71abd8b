target_sources(strobe_core PRIVATE
  ${CMAKE_CURRENT_LIST_DIR}/contents.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dropout_mask.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dtype.cpp
  ${CMAKE_CURRENT_LIST_DIR}/execution.cpp
  ${CMAKE_CURRENT_LIST_DIR}/memory.cpp
  ${CMAKE_CURRENT_LIST_DIR}/options.cpp
  ${CMAKE_CURRENT_LIST_DIR}/padding.cpp
  ${CMAKE_CURRENT_LIST_DIR}/parallel.cpp
  ${CMAKE_CURRENT_LIST_DIR}/part.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tensor_check.cpp
  ${CMAKE_CURRENT_LIST_DIR}/validate.cpp
  ${CMAKE_CURRENT_LIST_DIR}/work.cpp)
