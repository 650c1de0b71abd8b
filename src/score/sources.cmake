strobe_sources(score
  build.cpp
  bytecode.cpp
  derivative.cpp
  formula.cpp
  graph.cpp
  match.cpp
  scalar.cpp)
