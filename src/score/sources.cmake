strobe_sources(score
  build.cpp
  cuda_source.cpp
  derivative.cpp
  forms.cpp
  formula.cpp
  graph.cpp)
