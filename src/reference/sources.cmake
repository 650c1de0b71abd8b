target_sources(strobe_core PRIVATE ${CMAKE_CURRENT_LIST_DIR}/reference.cpp)
# The oracle rounds as IEEE 754 says, whatever flags the build sets.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/reference.cpp PROPERTIES COMPILE_OPTIONS "-fno-fast-math;-ffp-contract=off")
