"""What processes report: every series by name, and its way to Ray."""
