"""What earlier searches leave to the next one: the values, how they are learned, and how they are applied."""
