strobe_sources(score
  build.cpp
  derivative.cpp
  forms.cpp
  formula.cpp
  graph.cpp)
