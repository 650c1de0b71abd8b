strobe_sources(score
  build.cpp
  derivative.cpp
  formula.cpp
  graph.cpp
  match.cpp)
