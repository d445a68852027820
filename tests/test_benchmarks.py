"""benchmarks/step.py end to end (comm.py is in test_distributed.py), and what its figures are made of."""

import json
import re
import sys

import pytest
import torch
from conftest import ROOT, SCRIPT, data_args, gpt, launch, smoke_config

sys.path.insert(0, str(ROOT / "benchmarks"))
import against  # noqa: E402
import comm  # noqa: E402
import copying  # noqa: E402
import gpt2_baseline  # noqa: E402
import gpu  # noqa: E402
import laptop_choices  # noqa: E402
import peer  # noqa: E402
import roofline  # noqa: E402
import rules  # noqa: E402
import step  # noqa: E402


@pytest.mark.slow
def test_step_compares_profiles_and_predicts(shards, tmp_path):
    """The median is that of the steps, shares add up to it, and the prediction follows from the parts."""
    args = ["--preset=smoke", "--device=cpu", *data_args(shards), "--num_steps=6",
            f"--json={tmp_path}/step.json"]
    args += [f"--trace={tmp_path}/trace.json", "--compare=--num_value_embeds=0", "--predict_ranks=2"]
    done = launch([str(ROOT / "benchmarks" / "step.py"), *args, "--bus_gb_per_s=0.1"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "step.json").read_text())
    first, second = result["runs"]
    assert second["flags"] == first["flags"] + " --num_value_embeds=0" and result["data"] == "real shards"
    assert result["ratio"] == pytest.approx(second["ms_per_step"] / first["ms_per_step"])
    for run in result["runs"]:
        assert sum(run["parts"].values()) == pytest.approx(run["ms_per_step"])
        assert all(run["parts"][part] > 0 for part in step.PARTS[:5])
        assert run["quartiles_ms"][0] <= run["ms_per_step"] <= run["quartiles_ms"][1]
        assert len(run["ms_by_stage"]) == 3 and run["num_recompiles"] == 0
        assert run["tokens_per_s"] == pytest.approx(2048e3 / run["ms_per_step"], rel=1e-3)
    cfg = smoke_config()
    assert first["tflop_per_step"] == pytest.approx(gpt.count_flops(cfg) * 2048 / 1e12, rel=0.05)
    prediction, num_params = result["prediction"], gpt.derive(cfg, 1)["num_params"]
    assert prediction["messages_ms"] == pytest.approx(4 * num_params / 0.1e6, rel=1e-6)  # 2 P (N - 1) / N
    halves = prediction["forward_backward_ms"] + prediction["optimizer_ms"]
    assert halves == pytest.approx(first["ms_per_step"] / 2)
    assert prediction["exposed_ms"] == pytest.approx(halves + prediction["messages_ms"])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "second / first" in done.stdout and "recompiles" in done.stdout


@pytest.mark.slow
def test_step_makes_do_without_shards(tmp_path):
    args = ["--preset=smoke", "--device=cpu", "--train_files=none/*.bin", "--num_steps=3"]
    done = launch([str(ROOT / "benchmarks" / "step.py"), *args], tmp_path)
    assert done.returncode == 0 and "random tokens" in done.stdout, done.stderr[-2000:]
    done = launch([str(ROOT / "benchmarks" / "step.py"), "--preset=smoke", "--seq_len=100"], tmp_path)
    assert (done.returncode == 2 and done.stderr.count("\n") == 1
            and "step.py: error: --seq_len=100" in done.stderr)


@pytest.mark.parametrize("module, option, words", [
    (step, "--num_steps=2", "--num_steps: 2 is not a whole number of at least 3: see --help"),
    (step, "--predict_ranks=0", "0 is not a whole number of at least 1"),
    (step, "--compare='a", "--compare: invalid split value"),
    (step, "--num_step=9", "--num_step is not an option"),
    (comm, "--num_steps=0", "0 is not a whole number of at least 1"),
    (comm, "--max_mb=-1", "-1 is not a number of at least 0.004"),
    (copying, "--depth=3", "the following arguments are required: checkpoints"),
    (gpt2_baseline, "--options='a", "--options: invalid split value"),
    (gpt2_baseline, "--steps=0", "0 is not a whole number of at least 1"),
    (gpt2_baseline, "--options=--model_dims=4", "--model_dims is not an option: did you mean --model_dim"),
    (laptop_choices, "--num_steps=some", "some is not a whole number of at least 1"),
    (laptop_choices, "--variant=bare", "invalid choice: 'bare'"),
    (peer, "--seeds=0", "0 is not a whole number of at least 1"),
    (roofline, "--cards=h200,x1", "x1 is not one of h200"),
    (rules, "--seeds=1", "1 is not a whole number of at least 2")])
def test_bad_options_end_with_one_line(module, option, words, monkeypatch, capsys):
    """And status 2, whatever the tool."""
    name = f"{module.__name__}.py"
    monkeypatch.setattr(sys, "argv", [name, option])
    try:
        status = module.main()
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"{name}: error: ") and words in err


def test_the_gpu_days_files_keep_the_points_of_their_name(tmp_path):
    day = gpu.Day(gpu.Namespace(rehearse=True, out=tmp_path / "day_0.5"), [], tmp_path)
    day.note("tests", dict(ok=False, skipped="not run: the time was up"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0.5.json", "day_0.5.md"]


@pytest.mark.parametrize("name, shapes, part", [
    ("aten::mm", [[2048, 192], [192, 768]], "MLP"),
    ("aten::mul", [[2048, 768], [2048, 768]], "MLP"),
    ("aten::mm", [[2048, 192], [192, 576]], "attention"),
    ("aten::mm", [[2048, 192], [192, 192]], "attention"),
    ("aten::_softmax", [[32, 2, 64, 192]], "attention"),
    ("aten::mm", [[2048, 384], [384, 192]], "head and loss"),
    ("aten::embedding", [[384, 192], [2048]], "embedding, norms, residuals"),
    ("aten::mul", [[2048, 192], [2048, 1]], "embedding, norms, residuals")])
def test_operators_are_told_by_their_sizes(name, shapes, part):
    assert step.classify(name, shapes, gpt.make_config({"preset": "laptop_32"})) == part


@pytest.mark.slow
def test_the_gpu_day_is_rehearsed(tmp_path):
    """Every part of benchmarks/gpu.py on the CPU; the tests marked gpu are found, and skipped without a GPU."""
    done = launch([str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", f"--out={tmp_path}/day"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    result, rows = json.loads((tmp_path / "day.json").read_text()), (tmp_path / "day.md").read_text()
    parts = result["parts"]
    assert len(parts) == 6 and all(part["ok"] for part in parts.values())
    assert parts["tests"]["counts"]["skipped"] >= 20
    first, second = parts["step, kernels off beside auto"]["runs"]
    assert first["ms_per_step"] > 0 and second["flags"].endswith("--kernels=off")
    assert parts["fused against plain"]["differences"] == {"0": 0, "4": 0, "8": 0, "12": 0}  # both plain here
    assert rows.count("\n| ") == 7 and "not right" not in rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_the_gpu_day_says_that_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", f"--out={tmp_path}/day"])
    assert gpu.main() == 2
    err = capsys.readouterr().err
    assert "use --rehearse" in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_roofline_adds_up(tmp_path):
    """One kernel bound by memory, one by arithmetic, on rates of the data sheet times what is attainable."""
    nodes = [dict(kind="", call="", is_template=False, bytes=4.32e9, flops=0, operations=[]),
             dict(kind="", call="mm", is_template=False, bytes=1, flops=0.8 * 989e12, operations=[])]
    graph = dict(name="GPT.compute_loss", direction="forward", nodes=nodes, calls={"measured": 2, "training": 9})
    run = dict(graphs=[graph], eager={"measured update": {"zero_": [1, 4.32e9]}}, micros=2, updates=1)
    run |= dict(micros_per_step=8, bytes_per_rank=2 * 0.8 * 450e9)
    parts = roofline.tabulate(run, roofline.DEVICES["h200"], 1)
    assert parts["pointwise forward"] == pytest.approx([8, 34.56, 0, 8])  # a ms each, 8 micro-batches
    assert parts["head: matmuls"][0] == pytest.approx(8000)
    assert parts["eager: look-ups, sums of gradients"] == pytest.approx([1, 4.32, 0, 1])
    eight = roofline.tabulate(run, roofline.DEVICES["h200"], 8)
    assert eight["pointwise forward"][0] == pytest.approx(1)
    assert eight["sent, if nothing hid it"][0] == pytest.approx(1750)  # 7/8 of 2 s


def test_repeats_are_told_by_what_the_same_document_holds():
    """Eight tokens again: within reach, out of reach, in another document; and a run of one token."""
    eight = list(range(1, 9))
    inputs = torch.tensor([*eight, 9, *eight, 9, 9, 9, *eight, *[7] * 10], dtype=torch.int32)
    doc_ids = torch.zeros(len(inputs), dtype=torch.int32)
    repeats = copying.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=9)
    assert repeats.nonzero()[0].tolist() == [16, 17, 36, 37]  # the third time comes 11 tokens after the second
    repeats = copying.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=11)
    assert repeats.nonzero()[0].tolist() == [16, 17, 26, 27, 36, 37]
    doc_ids[9:] = 1
    repeats = copying.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=11)
    assert repeats.nonzero()[0].tolist() == [27, 36, 37]
    doc_ids = torch.tensor([0] * 12 + [1] * 4, dtype=torch.int32)  # the second eight ends in the next document
    inputs = torch.tensor([*eight, *eight], dtype=torch.int32)
    assert not copying.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=9).any()


@pytest.mark.slow
def test_the_loss_of_a_checkpoint_in_two_parts(shards, tmp_path):
    """Weighted by their shares they add up to the validation loss of the run."""
    args = ["--preset=smoke", *data_args(shards), "--num_iterations=4", "--val_tokens=2048", "--checkpoint_every=4"]
    done = launch([str(ROOT / "train_gpt.py"), *args], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("checkpoints/*/*.pt")
    (result,) = tmp_path.glob("logs/*.json")
    step, loss, share, repeated, others = copying.split_loss(path)
    assert step == 4 and 0 < share < 1
    assert share * repeated + (1 - share) * others == pytest.approx(loss, rel=1e-5)
    assert loss == pytest.approx(json.loads(result.read_text())["final_val_loss"], rel=1e-5)


def test_the_peer_takes_only_texts_that_it_has(monkeypatch):
    """One line and status 2 for a name it lacks, and for a package that cannot be fetched."""
    monkeypatch.setattr(sys, "argv", ["peer.py", "--only=code,poems"])
    assert peer.main() == 2
    monkeypatch.setenv("PATH", "")
    with pytest.raises(gpt.InputError, match="package jargon-text cannot be fetched .* give --only="):
        peer.TEXTS["prose"][1]()
    assert len(peer.TEXTS["code"][1]()) > 1_000_000


def test_two_versions_step_against_step(shards, monkeypatch, capsys):
    """The script against itself: the same losses, a ratio for every round; and one that differs shows it."""
    words = ["against.py", str(SCRIPT), "--preset=smoke", "--device=cpu", *data_args(shards)]
    monkeypatch.setattr(sys, "argv", [*words, "--rounds=2", "--steps=2"])
    assert against.main() == 0
    line = capsys.readouterr().out
    assert re.search(r"smoke, float32, 1 threads, 4 steps: [\d.]+ ms before, [\d.]+ after: [\d.]+ \(rounds ", line)
    assert "losses at most 0.0e+00 apart" in line
    load = against.load_script

    def load_another(path):
        module = load(path)
        monkeypatch.setattr(module.Schedule, "lr_factor", lambda *_: 0.5)
        return module

    monkeypatch.setattr(against, "load_script", load_another)
    monkeypatch.setattr(sys, "argv", [*sys.argv[:2], *words[2:], "--rounds=2", "--steps=2"])
    assert against.main() == 0
    assert "losses at most 0.0e+00" not in capsys.readouterr().out
    for words in (["/nowhere"], [str(SCRIPT), "--rounds=0"], [str(SCRIPT), "--preset=smoke", "--rounds=9"]):
        monkeypatch.setattr(sys, "argv", ["against.py", *words, "--device=cpu"])
        assert against.main() == 2 and capsys.readouterr().err.count("\n") == 1
