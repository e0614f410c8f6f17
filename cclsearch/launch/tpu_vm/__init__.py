"""TPU VMs: one process per worker of a slice, reached through `gcloud` or over plain SSH."""
