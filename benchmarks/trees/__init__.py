"""What guess trees give beside lines: on paper, and served."""
