from cclsearch.testing import MetricContract


class TestKernelJitter(MetricContract):
    metric = "kernel_jitter"
