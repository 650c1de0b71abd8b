"""Array libraries: what the package asks of one (base), PyTorch's and NumPy's answers, and whose an array is (known).

Nothing here knows of calls. base is at the bottom; known, which imports torch and numpy as it needs them, is on top."""
