"""What a run is worth: objectives, the admission gate, noise."""
