target_sources(strobe_core PRIVATE ${CMAKE_CURRENT_LIST_DIR}/engine.cpp)
