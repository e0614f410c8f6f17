"""From a request to a plan: inputs looked up, checked and frozen."""
