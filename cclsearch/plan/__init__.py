"""Turn a request into a plan: look up, check and freeze its inputs."""
