"""What guess trees give beside lines: on paper, simulated, and served."""
