"""An LLM provider outside the tree: a company's own server, with a protocol of its own."""
