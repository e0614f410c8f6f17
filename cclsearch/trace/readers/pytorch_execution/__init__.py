"""PyTorch's execution traces: operators, who called whom and their inputs, without times."""
