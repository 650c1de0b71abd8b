"""The paper's figures, drawn from runs on the machine at hand: measure.py writes a CSV a figure, draw.py makes pictures of them."""
