"""The task `command`: any program, of which only its figures are known."""
