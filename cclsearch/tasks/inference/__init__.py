"""The task `inference`: one batch of requests at a time."""
