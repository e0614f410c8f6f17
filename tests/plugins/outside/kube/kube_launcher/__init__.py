"""A launcher outside the tree: trials as pods of a stub that keeps its objects in a folder, as Kubernetes in etcd."""
