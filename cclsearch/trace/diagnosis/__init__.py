"""Step time by cause, and the causes of device idle time."""
