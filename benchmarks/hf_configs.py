"""Parameters that `card from-hf` counts for a config.json, beside those of transformers' own model class.

    pip install 'ccl-search[hf]'
    python benchmarks/hf_configs.py

Each family's configuration has transformers' defaults, which are those of a published model for most. The class is
built on the meta device, so that no weights are allocated.
"""

from __future__ import annotations

import statistics
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cclsearch.card.hf_config import FAMILIES, count_hf_parameters
from cclsearch.core.errors import UserError

SETTINGS = {"deepseek_v2": {"num_experts_per_tok": 6}}
"""Settings without a usable default."""


def main() -> int:
    errors = []
    for family in sorted(FAMILIES):
        try:
            config = CONFIG_MAPPING[family](**SETTINGS.get(family, {}))
        except KeyError:
            print(f"{family:<20} transformers has no such model_type")
            continue
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # foreign code: a default configuration that its own class refuses
            print(f"{family:<20} not built: {type(error).__name__}: {str(error)[:80]}")
            continue
        built = sum(parameter.numel() for parameter in model.parameters())
        try:
            counted = count_hf_parameters(config.to_dict(), family)
        except UserError as error:
            print(f"{family:<20}{built:>18,}  refused: {error}")
            continue
        errors.append(abs(counted / built - 1))
        print(f"{family:<20}{built:>18,}{counted:>18,}{counted / built - 1:>+9.2%}")
    within = [sum(error <= limit for error in errors) for limit in (0.01, 0.03)]
    print(f"\n{len(errors)} families: median difference {statistics.median(errors):.2%}, largest {max(errors):.2%}")
    print(f"within 1 %: {within[0]}, within 3 %: {within[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
