"""What a run is worth: objectives and the admission gate."""
