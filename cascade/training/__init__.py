"""Draft models made from the model that they draft for: text, students, distillation."""
