"""Links between the devices of published nodes, for benchmarks and tests."""

NVLINKS = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
"""NVLinks between the GPUs of a DGX-1 with V100, as `nvidia-smi topo -m` prints them (NV1, NV2, SYS)."""
XGMI_LINKS = (
    (0, 4, 1, 0, 0, 0, 2, 0),
    (4, 0, 0, 1, 0, 1, 0, 0),
    (1, 0, 0, 4, 2, 0, 0, 0),
    (0, 1, 4, 0, 0, 0, 0, 1),
    (0, 0, 2, 0, 0, 4, 1, 0),
    (0, 1, 0, 0, 4, 0, 0, 1),
    (2, 0, 0, 0, 1, 0, 0, 4),
    (0, 0, 0, 1, 0, 1, 4, 0),
)
"""xGMI links between the 8 GCDs of four MI250X: `connMatrix` of `rome_model_71` in RCCL's src/graph/rome_models.cc."""
