"""A metric of traces outside the tree."""
