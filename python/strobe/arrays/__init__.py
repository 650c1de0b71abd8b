"""Array libraries: the interface that the package needs (base), its PyTorch and NumPy versions, and the framework of an array (known).

Nothing here knows of calls. base is at the bottom; known, which imports torch and numpy on demand, is on top."""
