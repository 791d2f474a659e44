"""Makes draft models from the model that they draft for: text, students, distillation, alignment."""
