"""Names of kernels, operations and step markers, and what they mean."""
