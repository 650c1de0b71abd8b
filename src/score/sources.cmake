strobe_sources(score
  build.cpp
  bytecode.cpp
  derivative.cpp
  forms.cpp
  formula.cpp
  graph.cpp
  scalar.cpp)
