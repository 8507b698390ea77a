import math

import pytest

from blockpilot_hf.drafter_recipe import DrafterTrainingConfig, default_gamma


def test_gamma_is_the_papers_and_grows_with_the_block():
    assert [default_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]
    gammas = [default_gamma(size) for size in range(2, 33)]
    assert gammas == sorted(gammas) and len(set(gammas)) == len(gammas) and gammas[0] > 0
    assert 4 < default_gamma(9) < 5 < default_gamma(12) < 7
    assert DrafterTrainingConfig().gamma == 4.0


def test_the_rate_rises_linearly_then_falls_along_a_cosine():
    config = DrafterTrainingConfig(steps=100, learning_rate=0.5, min_learning_rate=0.1, warmup_ratio=0.1)
    rates = [config.learning_rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.05 * (i + 1) for i in range(10)])
    assert rates[10] == 0.5 and rates[55] == pytest.approx(0.3) and rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    # Past the end, as after a change of `steps`, it stays low.
    assert config.learning_rate_at(500) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "message", "good"),
    [
        ({"steps": 0}, "`steps` must be an integer >= 1, got 0", 1),
        ({"steps": 1.5}, r"`steps` must be an integer >= 1, got 1\.5", 2),
        ({"steps": True}, "`steps` must be an integer >= 1, got True", 1),
        ({"anchors_per_sequence": 0}, "`anchors_per_sequence` must be an integer >= 1", 1),
        ({"sequences_per_step": -1}, "`sequences_per_step` must be an integer >= 1", 1),
        ({"learning_rate": 0}, "`learning_rate` must be above 0 and finite, got 0", 1e-9),
        ({"learning_rate": math.inf}, "`learning_rate` must be above 0 and finite, got inf", 1e9),
        ({"gamma": math.nan}, "`gamma` must be above 0 and finite, got nan", 0.1),
        ({"max_grad_norm": -1}, "`max_grad_norm` must be above 0", 0.1),
        ({"distillation": 1.1}, r"`distillation` must be between 0 and 1, got 1\.1", 1),
        ({"warmup_ratio": -0.1}, "`warmup_ratio` must be between 0 and 1", 0),
        ({"accumulation": 0}, "`accumulation` must be an integer >= 1, got 0", 1),
        ({"block_sizes": ()}, r"`block_sizes` must be rising block sizes of at least 2, such as .*, got \(\)", (2,)),
        ({"block_sizes": (1, 4)}, "`block_sizes` must be rising block sizes of at least 2", (2, 4)),
        ({"block_sizes": (8, 4)}, "`block_sizes` must be rising", (4, 8)),
        ({"mixed_precision": "fp16"}, "cannot be 'fp16': its small gradients become 0 without loss scaling", "bf16"),
        ({"mixed_precision": "fp8"}, "`mixed_precision` must be 'no' or 'bf16', got 'fp8'", "no"),
        ({"weight_decay": -0.1}, "`weight_decay` must be at least 0", 0),
    ],
)
def test_values_out_of_range_are_refused(settings, message, good):
    with pytest.raises(ValueError, match=message):
        DrafterTrainingConfig(**settings)
    DrafterTrainingConfig(**dict.fromkeys(settings, good))


def test_without_a_gamma_each_block_size_has_its_own():
    config = DrafterTrainingConfig(gamma=None, block_sizes=(4, 8, 16))
    assert [config.gamma_at(size) for size in (4, 8, 16)] == [2, 4, 7]
    assert DrafterTrainingConfig(gamma=3.0).gamma_at(16) == 3.0


def test_accumulation_multiplies_the_texts_of_a_step():
    assert DrafterTrainingConfig(sequences_per_step=3, accumulation=4).texts_per_step == 12
