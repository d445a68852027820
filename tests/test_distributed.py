"""Several ranks against one: equal parameters, few bytes, and one line for each failure. Nodes find each other."""

import datetime
import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, assert_same_bits, data_args, gpt, launch, slow_but, smoke_config, smoke_run
from run_ranks import ENVIRONMENT, count_gloo_threads, find_port, round_to_multiple, run_ranks

NUM_RANKS = slow_but((2, 3, 4, 8), 2)
SMALL = dict(num_layers=3, model_dim=32, num_heads=2, head_dim=16)
CASES = {
    "exact": dict(groups={group: {"every": 2} for group in ("embed", "value_embed", "head", "scalar")}),
    "tied": dict(tie_head="on", embed_std=(0.02, 0.01), head_lr=0.0036, groups={"matrix": {"every": 2}}),
    "bfloat16": dict(embed_dtype="bfloat16", unit=8.0),
    "rounded": dict(unit=0.0, micro_batch_tokens=3072),
}
RULES_AND_CASES = [(rule, "exact") for rule in gpt.RULES if rule != "row_adam"]
RULES_AND_CASES += [(rule, case) for rule in ("muon", "adamw") for case in ("tied", "bfloat16", "rounded")]
FEW = [(rule, case) for rule, case in RULES_AND_CASES if rule in ("muon", "adamw") or rule == "normuonh"]
N_GRAMS = dict(  # updates after steps 2, 4 and 8
    num_layers=2, ngram_rows=202, ngram_order=3, num_iterations=16, late_start=0.25,
    groups={"ngram": {"rule": "row_adam", "every": 2, "late_every": 4}})  # fmt: skip


def train_cases(num_ranks: int, cases: dict, folder, *more) -> dict:
    """The results of run_ranks.equality by case."""
    path = folder / f"{num_ranks}.pt"
    ends, _, errors = run_ranks("equality", num_ranks, path, json.dumps(cases), *more, cwd=folder)
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def equality(shards, tmp_path_factory, request):
    """{number of ranks: {case: the results of rank 0 after four steps}}, see run_ranks.equality. Micro-batches have
    one sequence, so the sums do not depend on the number of ranks. Slow tests have 24 of them in a step, the others 4.
    Three layers have 8 matrices of one shape and 4 of another, which 3 and 8 ranks do not divide."""
    is_slow = "slow" in request.config.option.markexpr
    files = dict(train_files=f"{shards}/train_*.bin", val_files=f"{shards}/val_*.bin", device="cpu")
    rows = dict(seq_len=128, tokens_per_step=3072 if is_slow else 512, micro_batch_tokens=128, **files)
    smoke = dict(preset="smoke", num_iterations=8, adam_eps=1.0, **rows)
    cases = {"laptop": dict(rows, preset="laptop_32", dtype="float32", micro_batch_tokens=3072, num_iterations=4),
             "n-grams": {**smoke, **N_GRAMS}}
    for rule, case in RULES_AND_CASES if is_slow else FEW:
        keeps_norm = gpt.RULES[rule].keeps_norm
        lr = 0.02 if keeps_norm else dict(adamw=0.0018).get(rule, 0.05)
        options = dict(matrix_rule=rule, matrix_lr=lr, matrix_weight_decay=0.0 if keeps_norm else 0.1,
                       mlp_lr_mul=(2.0, 1.0), gains=["output"] if keeps_norm else [])  # fmt: skip
        cases[f"{rule} {case}"] = {**smoke, **SMALL, **options, **CASES[case]}
    folder = tmp_path_factory.mktemp("equality")

    class Results(dict):
        """Results by number of ranks, computed at first use. Only slow tests use more than two ranks."""

        def __missing__(self, num_ranks):
            self[num_ranks] = train_cases(num_ranks, cases, folder)
            return self[num_ranks]

    return Results()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("rule, case", slow_but([pair for pair in RULES_AND_CASES if pair[1] != "rounded"], *FEW))
def test_parameters_are_those_of_one_rank_to_the_last_bit(equality, rule, case, num_ranks):
    """Gradients on a grid have exact sums in any order, and each update is computed on one rank. "tied" adds the
    gradients of head and embedding. "bfloat16" has a coarse grid, because it has 8 significant bits. The ranks also
    compare hashes, and a difference fails the run."""
    one, several = (equality[ranks][f"{rule} {case}"]["params"] for ranks in (1, num_ranks))
    assert_same_bits(one, several)
    assert (one["embed"].dtype == torch.bfloat16) == (case == "bfloat16")
    assert torch.equal(one["embed"], one["head.weight"]) == (case == "tied")
    options = {name: value for name, value in CASES[case].items() if name != "unit"}
    start = gpt.GPT(smoke_config(**SMALL, **options)).state_dict()
    change = one["head.weight"].float() - start["head.weight"].float()
    assert change.abs().max() > 1e-3  # training has changed it


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_table_of_n_grams_has_the_bits_of_one_rank(equality, num_ranks):
    """Its 202 rows of bigrams and trigrams are divided among the ranks. Updates visit the rows that were read."""
    one, several = (equality[ranks]["n-grams"]["params"] for ranks in (1, num_ranks))
    assert_same_bits(one, several)
    assert one["ngram"].shape == (202, 64) and one["ngram"].any(1).sum() > 100


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_parameters_without_the_grid_agree_to_float32_rounding(equality, rule, num_ranks):
    """The order of float32 sums changes gradients of up to 1e3 by 1e3 * 2^-24 * sqrt(24) = 3e-4. Adam with epsilon 1
    multiplies this by the learning rate: at most 0.6 * 3e-4 = 2e-4 per step. Without the reduce-scatter or the
    all-gather the difference is above 0.1."""
    one, several = (equality[ranks][f"{rule} rounded"]["params"] for ranks in (1, num_ranks))
    for name, param in one.items():
        assert torch.allclose(param, several[name], rtol=0, atol=2e-4), name


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_bytes_sent_are_few_and_known(equality, num_ranks):
    """The minimum per rank is 2 P (N - 1) / N for the P bytes updated in a step, without the tables. Padding is also
    communicated: a segment of laptop_32 has two or four matrices of a kind. The Adam groups are updated in every
    second step. With a tied head this holds for the matrices, and the table shared by head and embedding is sent once.
    A rank reads at most one row of a table per token, and sends its gradient."""
    results = equality[num_ranks]
    assert all(len({*result["others"]}) == 1 and min(result["rows"]) > 0 for result in results.values())
    for case, most in {"laptop": {2: 1.002, 3: 1.5, 4: 1.7, 8: 3.2}[num_ranks], "adamw rounded": 1.03,
                       "adamw exact": 1.15, "adamw tied": 1.15}.items():  # single elements need little padding
        assert 1 <= results[case]["others"][0] / results[case]["minimum"] < most, case
    groups = {name: param.spec.group for name, param in gpt.GPT(smoke_config(**SMALL)).named_parameters()}
    for case in ("laptop", "adamw exact", "adamw tied"):
        cfg = smoke_config(**CASES.get(case.removeprefix("adamw "), {}))
        params = {name: p.nbytes for name, p in equality[1][case]["params"].items()}
        params["embed"] *= not cfg.tie_head
        tables = [params.pop(name) for name in [*params] if name.startswith("value_embeds.")]
        every = {name: cfg.groups[groups[name]].every if case != "laptop" else 1 for name in params}
        due = sum(2 * nbytes / every[name] for name, nbytes in params.items())
        assert results[case]["minimum"] == pytest.approx(due * (num_ranks - 1) / num_ranks)
        assert max(results[case]["rows"]) <= 3072 * 2 * sum(tables) / 257


@pytest.mark.slow
def test_two_ranks_of_two_threads_are_one_of_two(shards, tmp_path):
    """Of matrices so large that the BLAS splits sums over threads. Their bits depend on the number of threads."""
    size = dict(model_dim=192, head_dim=96, seq_len=1024, micro_batch_tokens=1024, max_doc_len=1024)
    files = dict(train_files=f"{shards}/train_*.bin", val_files=f"{shards}/val_*.bin", device="cpu")
    cases = {"large": dict(preset="smoke", num_iterations=6, tokens_per_step=2048, dtype="bfloat16", **size, **files)}
    one, two = (train_cases(num_ranks, cases, tmp_path, 2)["large"]["params"] for num_ranks in (1, 2))
    assert_same_bits(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_segments", [2, 5])
def test_gradients_do_not_depend_on_the_segments(dtype, num_segments, monkeypatch):
    """To the last bit, with all mechanisms. Several ranks have more segments than one."""
    monkeypatch.setattr(gpt, "MULTI_RANK_SEGMENTS", num_segments)
    cfg = gpt.make_config(dict(preset="smoke_92", device="cpu"))
    state, tokens, gradients = gpt.Schedule(cfg).at(0), torch.arange(512) ** 2 % 257, []
    batch = gpt.Batch(tokens.int(), tokens.roll(-1), torch.arange(512).int() // 100)
    step_inputs = gpt.make_step_inputs(state, 512, 256, cfg, torch.device("cpu"))
    for ranks in (1, 2):
        torch.manual_seed(1)
        model = gpt.GPT(cfg, segments=gpt.split_layers(cfg.num_layers, ranks))
        assert len(model.segments) == (1 if ranks == 1 else num_segments)
        with torch.no_grad():  # a zero head and zero output projections would hold back gradients
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.02)
        model(batch, step_inputs, gpt.Operations(dtype), torch.tensor(state.loss_weights)).backward()
        gradients.append({name: param.grad for name, param in model.named_parameters() if name != "embed"})
        assert model.is_tied and all(grad.any() for grad in gradients[-1].values())
    assert_same_bits(*gradients)


def test_round_to_grid_makes_sums_exact():
    torch.manual_seed(0)
    for dtype, grid, size in ((torch.float32, 2.0**-12, 30.0), (torch.bfloat16, 0.5, 6.0)):
        x = round_to_multiple((torch.randn(64, 100) * size / 8).to(dtype), grid)
        assert torch.equal(x / grid, (x / grid).round()) and x.abs().max() > 4 * grid
        sequential, backwards = torch.zeros(100, dtype=dtype), torch.zeros(100, dtype=dtype)
        for row in x:
            sequential += row
        for row in x.flip(0):
            backwards += row
        assert torch.equal(sequential, x.double().sum(0).to(dtype)) and torch.equal(sequential, backwards)


@pytest.mark.slow
def test_comm_benchmark(tmp_path):
    """Bandwidth is 2 (N - 1) / N bytes over time. A step sends less than 1.1 times the minimum."""
    args = ["--preset=smoke", "--device=cpu", "--max_mb=0.02", "--num_steps=2", f"--json={tmp_path}/comm.json"]
    done = launch([str(ROOT / "benchmarks" / "comm.py"), *args], tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "comm.json").read_text())
    assert [row["bytes"] for row in result["messages"]] == [4096, 16384]
    for row in result["messages"]:
        for kind in ("all_reduce", "reduce_scatter + all_gather"):
            assert row[kind]["bus_gb_per_s"] == pytest.approx(row["bytes"] / row[kind]["ms"] / 1e6)
    silent, step = result["steps"]
    assert (silent["mb"], silent["exposed"]) == (0, 0) and silent["minimum_mb"] == step["minimum_mb"]
    assert 1 <= step["mb"] / step["minimum_mb"] < 1.1 and 0 <= step["exposed"] < 1 and result["advice"] in done.stdout


def start_agents(shards, folder, *options) -> list[subprocess.Popen]:
    """torchrun --nnodes=2, each agent in its own folder."""
    args = ["--preset=smoke", "--device=cpu", "--micro_batch_tokens=512", *data_args(shards), *options]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{find_port()}", str(ROOT / "train_gpt.py"), *args]
    agents = []
    for node in ("a", "b"):
        (folder / node).mkdir()
        env = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
        agents.append(subprocess.Popen(command, cwd=folder / node, stderr=subprocess.PIPE, text=True, env=env))
    return agents


@pytest.mark.slow
def test_two_agents_make_one_job(shards, tmp_path):
    """The job writes one log and one json, with the loss of one process."""
    for agent in start_agents(shards, tmp_path):
        _, errors = agent.communicate(timeout=3000)
        assert agent.returncode == 0, errors[-2000:]
    (path,) = tmp_path.rglob("*_seed0_*.json")
    result = json.loads(path.read_text())
    assert result["hardware"]["ranks"] == 2
    (tmp_path / "one").mkdir()
    alone = smoke_run(shards, tmp_path / "one", "--micro_batch_tokens=512")
    assert result["final_val_loss"] == pytest.approx(alone["final_val_loss"], abs=1e-4)  # sums in another order


@pytest.mark.slow
def test_two_agents_stop_when_one_is_told_to(shards, tmp_path):
    """SIGTERM to one agent. Both ranks write into the shared folder, and one line names the checkpoint."""
    first, second = start_agents(shards, tmp_path, "--num_iterations=100", f"--out={tmp_path}/shared")
    while not any("step:3/" in path.read_text() for path in tmp_path.rglob("*_seed0_*.txt")):
        time.sleep(0.1)
        assert first.poll() is None and second.poll() is None
    second.send_signal(signal.SIGTERM)
    errors = [agent.communicate(timeout=3000)[1] for agent in (first, second)]
    (step,) = tmp_path.rglob("step_*")
    assert sorted(path.name for path in step.iterdir()) == ["rank0.pt", "rank1.pt", "state.json"]
    start = "train_gpt.py: stopped by SIGTERM after step "
    lines = [line for text in errors for line in text.splitlines() if start in line]
    assert len(lines) == 1 and str(step) in lines[0]
    assert first.returncode and second.returncode


@pytest.mark.slow
def test_a_folder_that_nodes_do_not_share_is_refused(shards, tmp_path):
    agents = start_agents(shards, tmp_path, "--checkpoint_every=4")
    errors = [agent.communicate(timeout=3000)[1] for agent in agents]
    assert all(agent.returncode for agent in agents) and any("is not shared by all nodes" in text for text in errors)


@pytest.mark.parametrize("what, options", slow_but(
    [("option", "--matrix_lr=1.0"), ("seed", "--seed=5"), ("data", ""), ("script", "")], ("data", "")))  # fmt: skip
def test_ranks_that_differ_do_not_train(shards, tmp_path, what, options):
    """All ranks end with status 2 and a line."""
    args = [*TINY, "--record=mixed", "--tokens_per_step=1024", *data_args(shards)]
    shutil.copytree(shards, tmp_path / "other")
    data = bytearray((tmp_path / "other/train_0.bin").read_bytes())
    data[-2] = 98  # a token of the last document
    (tmp_path / "other/train_0.bin").write_bytes(data)
    ends, _, errors = run_ranks("train_mixed", 2, what, tmp_path / "other", options, *args, cwd=tmp_path)
    assert [status for status, _ in ends] == [2, 2], errors
    assert "error: rank 1 has another " in errors and "Traceback" not in errors
    assert not list(tmp_path.rglob("*_seed*"))


FAILURES = {  # (how, which rank): exit status of this rank, without a launcher
    ("raise", 1): 1, ("kill", 0): -signal.SIGKILL, ("kill", 1): -signal.SIGKILL,
    ("freeze", 0): -signal.SIGSTOP, ("freeze", 1): -signal.SIGSTOP,
}  # fmt: skip
FAILING = [*TINY, "--num_iterations=6", "--tokens_per_step=1536"]


@pytest.mark.parametrize("how, rank", slow_but(FAILURES, ("raise", 1), ("kill", 0)))
def test_all_leave_when_one_rank_fails(shards, tmp_path, how, rank):
    """The ranks are forks without a launcher. A frozen rank is detected after 20 s, and all others end within 60 s."""
    ends, _, errors = run_ranks("fail", 3, how, rank, *FAILING, *data_args(shards), cwd=tmp_path)
    assert [status for status, _ in ends] == [FAILURES[how, rank] if i == rank else 1 for i in range(3)], errors
    assert max(seconds for _, seconds in ends) < 60 and not list(tmp_path.rglob("*_seed*.json"))
    assert errors.count("ValueError: one step too many\n") == (how == "raise")


@pytest.mark.parametrize("how, rank", slow_but(FAILURES, ("kill", 1)))
def test_torchrun_ends_when_one_rank_fails(shards, tmp_path, how, rank):
    """torchrun ends with a status, and no process is left. It kills a frozen rank after another 30 s."""
    args = ["fail", "2", how, str(rank), *FAILING, "--tokens_per_step=1024", *data_args(shards), f"--out={tmp_path}"]
    done = launch([str(ROOT / "tests" / "run_ranks.py"), *args], tmp_path, nproc=2, env=ENVIRONMENT)
    assert done.returncode != 0
    assert subprocess.run(["pgrep", "-f", f"out={tmp_path}"], capture_output=True).stdout == b""


def test_ranks_that_cannot_share_a_step_end_with_one_line(shards, tmp_path):
    words = [str(ROOT / "train_gpt.py"), "--preset=smoke", "--device=cpu", "--tokens_per_step=512", *data_args(shards)]
    done = launch(words, tmp_path, nproc=2)
    lines = {line for line in done.stderr.splitlines() if line.startswith("train_gpt.py: error:")}
    assert done.returncode != 0 and len(lines) == 1 and "512" in lines.pop()  # a slow torchrun lets rank 1 repeat it


def test_gradients_and_parameters_have_a_group_each(monkeypatch):
    """All-gathers do not queue behind reductions. Both get the timeout of a step, the gloo group keeps its own."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        comm, used = gpt.Comm(0, 2, *(dist.new_group(timeout=gpt.LONG_TIMEOUT) for _ in range(2))), []
        comm.set_timeout(datetime.timedelta(seconds=7))
        timeouts = [group._get_backend(torch.device("cpu")).options._timeout
                    for group in (dist.group.WORLD, comm.gloo_group, comm.all_gather_group)]
        for name in ("reduce_scatter_single", "all_gather_single"):
            monkeypatch.setattr(gpt, name, lambda *_, group=None, async_op: used.append(group))
        comm.reduce_scatter(torch.zeros(4)), comm.all_gather(torch.zeros(4), torch.zeros(2))
        dist.all_reduce(torch.zeros(1), group=comm.gloo_group)  # a thread has its name once it works
        assert count_gloo_threads() > 0 and used == [None, comm.all_gather_group]
    finally:
        used.clear()
        comm.close()
    assert [timeout.total_seconds() for timeout in timeouts] == [7, 3600, 7] and count_gloo_threads() == 0
