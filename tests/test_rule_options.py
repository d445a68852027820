"""Preset muonh, and presets for a depth."""

import json

import pytest
from conftest import ROOT, gpt

from tools import scale_by_depth as tool


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """A function that returns the config of a preset that the tool makes. Presets are found below this folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets").mkdir(parents=True)

    def make(depth: int, **options):
        (tmp_path / "presets/deep.json").write_text(json.dumps(tool.scale_by_depth(depth, **options)))
        return gpt.make_config({"preset": "deep"})

    return make


PUBLISHED = {  # depth: width, parameters in millions, tokens a step, decay, steps at 12 and at 8 tokens per parameter
    4: (256, 11.5, 2**18, 0.520, 528, 352),  # 1.890 before the clamp
    8: (512, 41.9, 2**18, 0.520, 1920, 1280),
    12: (768, 110.1, 2**19, 0.280, 2520, 1680),
    16: (1024, 234.9, 2**19, 0.131, 5376, 3584),
    20: (1280, 435.2, 2**20, 0.100, 4980, 3320),
    24: (1536, 729.8, 2**20, 0.060, 8352, 5568),
    26: (1664, 918.4, 2**20, 0.048, 10510, 7007),
    32: (2048, 1677.7, 2**21, 0.037, 9600, 6400),
}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_depth_has_the_published_values(depth, config_of):
    """The published depth recipe, with its vocabulary of 32,768."""
    width, millions, batch, decay, steps_at_12, steps_at_8 = PUBLISHED[depth]
    cfg = config_of(depth, vocab_size=32_768)
    matrix = cfg.groups["matrix"]
    assert (cfg.num_layers, cfg.model_dim, cfg.num_heads) == (depth, width, width // 128)
    assert cfg.tokens_per_step == batch
    assert 12 * depth * width**2 + 32_768 * width == pytest.approx(millions * 1e6, rel=0.005)
    assert cfg.num_iterations == pytest.approx(steps_at_12, abs=1)
    assert matrix.weight_decay == pytest.approx(decay, abs=6e-4)
    assert matrix.lr == pytest.approx(0.02 * (batch / 2**19) ** 0.5)
    fewer = config_of(depth, vocab_size=32_768, tokens_per_param=8.0)
    assert fewer.num_iterations == pytest.approx(steps_at_8, abs=1)
    assert [spec.value_embed is not None for spec in cfg.layers][::-1] == [i % 2 == 0 for i in range(depth)]


def test_depth_scales_the_step_of_rules_that_keep_norms(config_of):
    """0.02 * 12 / depth, times the root of batch / 2^19."""
    matrix = config_of(24, rule="muonh").groups["matrix"]
    assert (matrix.lr, matrix.weight_decay) == (pytest.approx(0.02 * 2**0.5 / 2), 0)
    derived = gpt.derived_numbers(gpt.make_config({"preset": "d12"}), 8)
    heads, width, vocab = 6, 768, 50_304
    keys = 3 * 2048 + 9 * 512  # three long layers of twelve, and nine short ones
    assert derived["flops_per_token"] == 6 * (12 * 12 * width**2 + vocab * width) + 12 * width * keys
    assert derived["num_params"] == (8 * vocab * width + 12 * (12 * width**2 + heads * 12) + 12 * 2 + 12 + 6)


def test_depth_with_the_muonh_recipe(config_of):
    """Gains and schedules are preset muonh's."""
    recipe, cfg = gpt.make_config({"preset": "muonh"}), config_of(24, rule="normuonh")
    names = "init_std gains orthogonalize adam_eps cooldown_frac matrix_cooldown_frac final_lr_frac".split()
    assert all(getattr(cfg, name) == getattr(recipe, name) for name in names)
    assert (cfg.momentum, cfg.momentum_warmup_steps, cfg.lr_warmup_frac) == ((0.85, 0.95), 300, 0)
    assert cfg.groups["matrix"].lr == pytest.approx(0.02 * 2**0.5 / 2)
    assert cfg.groups["head"].lr == pytest.approx(0.004 * 2**0.5 * 2**-0.5)  # twice the batch, twice the width


def test_depth_with_other_rules_and_batches(config_of):
    """Half the batch: twice the steps, rates by its root, so that lr wd tokens stays. Adam has another rate."""
    cfg = config_of(24, vocab_size=32_768, tokens_per_step=2**19)
    assert (cfg.num_iterations, cfg.groups["matrix"].lr) == (16704, pytest.approx(0.02))
    assert cfg.groups["matrix"].weight_decay == pytest.approx(0.060 / 2**0.5, abs=6e-4)
    adam = config_of(12, rule="adamw")
    assert (cfg.mlp_lr_mul, adam.mlp_lr_mul) == ((2, 1), (1, 1))
    matrix = adam.groups["matrix"]
    assert (matrix.lr, matrix.weight_decay) == (pytest.approx(0.0018), 0)
    assert adam.adam_eps == pytest.approx(1e-10 * 49_152)


@pytest.mark.parametrize("depth", [12, 24, 26])
def test_the_presets_in_the_repository(depth, tmp_path, monkeypatch, capsys):
    """The tool writes each again."""
    (tmp_path / "presets").mkdir(parents=True)
    (tmp_path / "presets/muonh.json").write_text((ROOT / "presets/muonh.json").read_text())
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.main([str(depth)]) == 0
    name = f"presets/d{depth}.json"
    assert json.loads((tmp_path / name).read_text()) == json.loads((ROOT / name).read_text())
    assert gpt.make_config({"preset": f"d{depth}"}).num_layers == depth


def test_a_small_batch_has_short_sequences(config_of):
    """Both must divide the step, or the preset could not be trained."""
    cfg = config_of(4, tokens_per_step=4096)
    assert (cfg.tokens_per_step, cfg.seq_len, cfg.micro_batch_tokens) == (4096, 4096, 8192)


def test_another_preset_of_the_name_stays(capsys):
    """Depth 12 is presets/d12.json. With another vocabulary it would be another preset."""
    before = (ROOT / "presets/d12.json").read_text()
    assert tool.main(["12"]) == 0 and tool.main(["12", "--vocab_size=257"]) == 2
    assert "presets/d12.json is another preset" in capsys.readouterr().err
    assert (ROOT / "presets/d12.json").read_text() == before
