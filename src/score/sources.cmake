strobe_sources(score
  build.cpp
  cuda_source.cpp
  derivative.cpp
  formula.cpp
  graph.cpp
  match.cpp)
