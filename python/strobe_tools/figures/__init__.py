"""The paper's figures, drawn from runs on the machine at hand: measure.py writes one CSV per figure, draw.py makes pictures of them."""
