"""TPU VMs: one process a worker of a slice, reached through `gcloud` or over plain SSH."""
