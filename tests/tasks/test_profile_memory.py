"""The bytes of activations that `profile` counts, for networks of any depth."""

import time
from dataclasses import replace

import pytest
import torch

from tasks.profiling import counting
from tasks.profiling.networks import NETWORKS, main_stacks, resized
from tests.tasks.test_profile import CONFIGS, TASKS


@pytest.mark.parametrize("kind", CONFIGS.keys() - {"prefix"})
def test_activations_are_those_that_a_real_step_keeps(kind: str) -> None:
    network = NETWORKS[TASKS.get(kind, "vit")]
    config = network.fill(CONFIGS[kind], 31, 8)
    for dtype in counting.DTYPES.values():
        net = network.build(config).to(dtype)
        real = counting.kept_bytes(network, net, network.inputs(config, 2, 8, "cpu"))
        assert counting.saved_bytes(network, config, 2, 8, dtype, "cpu") == real > 0


@pytest.mark.parametrize("kind", CONFIGS.keys() - {"prefix"})
def test_activations_of_many_blocks_are_those_of_all(kind: str) -> None:
    """Also if paths are dropped, but not in the first block."""
    network = NETWORKS[TASKS.get(kind, "vit")]
    config = resized(network.fill(CONFIGS[kind], 31, 8), depth=7)
    dropping = {name: replace(s, drop_path=0.1) for name, s in main_stacks(config).items()}
    for one in (config, replace(config, **dropping)):
        sizes = (2, 8, torch.float32, "cpu")
        expected = counting.saved_bytes_of_all(network, one, *sizes)
        assert expected is not None
        assert counting.saved_bytes(network, one, *sizes) == expected


def test_a_large_network_is_counted_in_seconds() -> None:
    """Without 96 blocks and without chunks of the loss, which take 5 s."""
    network = NETWORKS["lm"]
    config = network.fill(network.presets["gpt3"], 50257, 2048)
    start = time.process_time()
    found = counting.saved_bytes(network, config, 1, 2048, torch.float32, "cpu")
    assert time.process_time() - start < 2.5
    assert found == 157_369_057_284  # as all blocks and all chunks have it
