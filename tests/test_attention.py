"""Attention: masks, the plain form and three fast forms, one graph for all windows. RoPE. The choice of a form."""

import dataclasses
import math
import shutil

import pytest
import torch
from conftest import gpt, make_runtime, smoke_config
from torch.nn.attention.flex_attention import flex_attention

CASES = [
    (256, 1, 40),
    (256, 64, 17),
    (384, 100, 90),
    (512, 128, 1000),
    (640, 639, 200),
]  # T, window, mean document length


def make_doc_ids(num_tokens: int, mean_length: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.rand(num_tokens) < 1 / mean_length).cumsum(0).int()


def brute_force_mask(doc_ids: torch.Tensor, window: int) -> torch.Tensor:
    """(T, T) from the definition, pair by pair."""
    ids = doc_ids.tolist()
    return torch.tensor(
        [[j <= i and i - j <= window and ids[i] == ids[j] for j in range(len(ids))] for i in range(len(ids))]
    )


def attend_naive(q, k, v, mask):
    scores = torch.einsum("qhk,shk->hqs", q, k).masked_fill(~mask, -torch.inf)
    return torch.einsum("hqs,shk->qhk", scores.softmax(-1), v)


def make_dense_mask(build, doc_ids, window):
    """The mask of a form, with the dtype of the scores if it is added to them."""
    return build(doc_ids, window, torch.float64) if build is not gpt.make_mask else build(doc_ids, window)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(
    "build, attend",
    [
        (gpt.make_mask, gpt.attention),
        (gpt.build_dense_mask, gpt.attend_blocks),
        (gpt.build_cpu_mask, gpt.BlockAttention.apply),
        (gpt.build_dense_mask, gpt.BlockAttention.apply),
    ],
)
@pytest.mark.parametrize("num_tokens, window, mean_length", CASES)
def test_attention_equals_the_definition_forward_and_backward(
    num_tokens, window, mean_length, build, attend, num_rows
):
    """Of one packed sequence and of two. Sequences that are shorter than the window are one block.

    Values have other channels than queries and keys.
    """
    row_len = num_tokens // num_rows
    doc_ids = make_doc_ids(num_tokens, mean_length) + torch.arange(num_tokens).int() // row_len
    mask = brute_force_mask(doc_ids, window)
    ours = [torch.randn(num_tokens, 2, width, dtype=torch.float64, requires_grad=True) for width in (16, 16, 24)]
    naive = [x.detach().clone().requires_grad_() for x in ours]
    made = make_dense_mask(build, doc_ids, window)
    if build is gpt.make_mask:
        assert torch.equal(made, mask)
    else:
        assert made.size(2) <= num_tokens
        assert (made.size(0) == 1) == (-(-window // 64) * 64 + 64 >= num_tokens)
    y = attend(*ours, made)
    expected = attend_naive(*naive, mask)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.allclose(y, expected, atol=1e-12)
    for a, b in zip(ours, naive):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)


@pytest.mark.parametrize("size", [None, 16, 128, 256])
@pytest.mark.parametrize("num_tokens, window, mean_length", CASES)
def test_both_masks_by_blocks_are_equal(num_tokens, window, mean_length, size):
    """The one in closed form, and the one that asks is_visible() about each pair."""
    doc_ids = make_doc_ids(num_tokens, mean_length)
    for dtype in (torch.float32, torch.bfloat16):
        masks = [build(doc_ids, window, dtype, size) for build in (gpt.build_dense_mask, gpt.build_cpu_mask)]
        assert masks[0].dtype == masks[1].dtype == dtype and torch.equal(*masks)


@pytest.mark.parametrize("num_tokens, window, mean_length", CASES)
def test_block_mask_covers_exactly_the_visible_blocks(num_tokens, window, mean_length):
    doc_ids = make_doc_ids(num_tokens, mean_length)
    mask = brute_force_mask(doc_ids, window)
    blocks = mask.view(num_tokens // 128, 128, num_tokens // 128, 128).transpose(1, 2).flatten(2)
    made = gpt.build_block_mask(doc_ids, torch.tensor(window))
    listed, full = torch.zeros(2, *blocks.shape[:2], dtype=torch.bool)
    for out, counts, indices in (
        (listed, made.kv_num_blocks, made.kv_indices),
        (full, made.full_kv_num_blocks, made.full_kv_indices),
    ):
        for row in range(len(out)):
            out[row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    assert not (listed & full).any()
    assert torch.equal(full, blocks.all(-1))  # skips the mask function: must be visible throughout
    assert not (blocks.any(-1) & ~(listed | full)).any()  # nothing visible is left out
    # at most one empty block per row is visited in vain
    assert (listed & ~blocks.any(-1)).sum() <= len(listed)
    for counts, indices, seen in (
        (made.q_num_blocks, made.q_indices, listed),
        (made.full_q_num_blocks, made.full_q_indices, full),
    ):  # backward reads the lists by key block
        for column in range(len(seen)):
            rows = indices[0, 0, column, : counts[0, 0, column]].long()
            assert rows.tolist() == seen[:, column].nonzero().flatten().tolist()


@pytest.mark.parametrize("num_tokens, window, mean_length", CASES)
def test_flex_attention_equals_the_definition(num_tokens, window, mean_length):
    """Not compiled, with the blocks and the mask function that training gives it."""
    doc_ids = make_doc_ids(num_tokens, mean_length)
    q, k, v = torch.randn(3, num_tokens, 2, 16, dtype=torch.float64)
    v = v[..., :8]
    mask = gpt.build_block_mask(doc_ids, torch.tensor(window))
    expected = attend_naive(q, k, v, brute_force_mask(doc_ids, window))
    assert torch.allclose(gpt.attend_flex(q, k, v, mask), expected, atol=1e-12)


def attend_flex_on_copies(q, k, v, mask):
    q, k, v = (x[None].transpose(1, 2).contiguous() for x in (q, k, v))
    return flex_attention(q, k, v, block_mask=mask, scale=1.0)[0].transpose(0, 1)


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)
@pytest.mark.slow
@pytest.mark.parametrize("num_segments", [1, 3])
def test_flex_and_dense_agree_and_the_graphs_serve_all_windows(num_segments, monkeypatch):
    """The whole model, compiled with FlexAttention (whose forward runs on the CPU), against the plain form.

    On whole tensors: the CPU form of FlexAttention ignores the offset of a view (test_gpu has the views).
    """
    rows = gpt.list_fast_forms()
    flex_row = rows["flex_attention"]
    flex_row = flex_row._replace(fast={**flex_row.fast, "attention": attend_flex_on_copies})
    monkeypatch.setattr(gpt, "list_fast_forms", lambda: {**rows, "flex_attention": flex_row})
    others = [gpt.LayerSpec("short", value_embed=0, skip_from=0)] * num_segments
    layers = (gpt.LayerSpec("long", mlp=False, value_embed=0), *others)
    cfg = smoke_config(
        num_layers=len(layers), layers=layers, model_dim=32, num_heads=2, head_dim=16, seq_len=512
    )
    torch.manual_seed(0)
    runtimes = make_runtime(fast=frozenset({"flex_attention"})), make_runtime()
    flex, dense = (gpt.GPT(cfg, rt).eval() for rt in runtimes)
    assert flex.eval_ops.attention is attend_flex_on_copies and dense.eval_ops.attention is gpt.attention
    for a, b in zip(flex.parameters(), dense.parameters()):
        a.data.add_(torch.randn_like(a) * 0.1)
        b.data.copy_(a)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    flex.split_layers(num_segments)
    for part in flex.segments:
        part.run_blocks = torch.compile(part.run_blocks, dynamic=False, fullgraph=True)
    schedule, windows = gpt.Schedule(cfg), []
    with torch.no_grad():
        for step in (0, 5, 9, 12):  # every stage, and the final validation
            state = schedule.at(step)
            tokens, targets, ids = (
                torch.randint(257, (2, 512)),
                torch.randint(257, (512,)),
                make_doc_ids(512, 60, step),
            )
            ours, expected = (
                model(tokens[0].int(), targets, ids, gpt.make_step_inputs(state, 512, 512, rt, cfg))
                for model, rt in zip((flex, dense), runtimes)
            )
            assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
            windows.append(state.windows)
    assert len(set(windows)) == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_segments


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
def test_rotary_keeps_norms_and_depends_on_distance_alone(pairs):
    cfg = smoke_config(rotary_pairs=pairs)
    state = gpt.Schedule(cfg).at(0)
    rope = gpt.make_step_inputs(state, 64, 64, make_runtime(), cfg).ropes["long", False]
    x = torch.randn(2, 1, 1, 32).expand(64, 2, 1, 1, 32)  # equal q and k at every position
    rotated = gpt.rotate(x, rope.cos, rope.sin, pairs)
    y = rotated[:, :, 0, 0]  # (64, 2, 32)
    assert torch.allclose(y[:, 1].norm(dim=-1), x[0, 1].norm().expand(64), rtol=1e-5)
    assert torch.allclose(
        y[:, 0].norm(dim=-1), state.rope["long"].softmax_scale * x[0, 0].norm().expand(64), rtol=1e-5
    )
    back = gpt.rotate(rotated, rope.cos, rope.sin, pairs, inverse=True)[:, 1, 0, 0]  # keys have no softmax scale
    assert torch.allclose(back, x[:, 1, 0, 0], atol=1e-5)
    scores = y[:, 0] @ y[:, 1].T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert (scores[5, 5] - scores[5, 0]).abs() > 1e-3


def test_positions_start_anew_with_each_packed_sequence():
    cfg = smoke_config()
    cos = gpt.make_step_inputs(gpt.Schedule(cfg).at(0), 128, 64, make_runtime(), cfg).ropes["long", False].cos
    assert torch.equal(cos[:64], cos[64:]) and not torch.equal(cos[1], cos[2])


ATTENTION_FORMS = [name for name, row in gpt.list_fast_forms().items() if "attention" in row.fast]


def test_masks_of_paired_heads_see_two_rows_of_every_token(monkeypatch):
    """Every form of attention. Each token has two positions, and the window counts positions."""
    layers = (gpt.LayerSpec(paired=True), gpt.LayerSpec("long"))
    cfg = smoke_config(num_layers=2, layers=layers, seq_len=256)
    doc_ids, state = torch.arange(256) // 100, gpt.Schedule(cfg).at(0)
    (long, short), rows = state.windows, torch.arange(512)
    masks, operations = {}, {}
    for form in ("plain", *ATTENTION_FORMS):
        rt = make_runtime(fast=frozenset({form} - {"plain"}))
        made, model = {}, gpt.GPT(cfg, rt)

        def note(block, x, acts, s, mask, *_, made=made):
            made[block.spec.attention, block.spec.paired] = mask
            return x

        with monkeypatch.context() as patch:
            patch.setattr(gpt.Block, "forward", note)
            model.run_layers(doc_ids.int(), doc_ids, gpt.make_step_inputs(state, 256, 256, rt, cfg))
        assert set(made) == {("short", True), ("long", False)}
        masks[form], operations[form] = made, model.ops
    assert len({ops.attention for ops in operations.values()}) == 4
    for (kind, paired), window, ids in (
        (("short", True), short, doc_ids.repeat_interleave(2)),
        (("long", False), long, doc_ids),
    ):
        at = rows[: len(ids)]
        expected = (at <= at[:, None]) & (at[:, None] - at <= window) & (ids == ids[:, None])
        assert torch.equal(masks["plain"][kind, paired], expected)
        flex = masks["flex_attention"][kind, paired]
        assert torch.equal(flex.mask_mod(0, 0, at[:, None], at), expected)
        assert flex.shape[-2:] == (len(ids), len(ids))
        q, k = torch.randn(2, len(ids), 1, 8)
        scores = (q[:, 0] @ k[:, 0].T).masked_fill(~expected, -math.inf).softmax(-1)
        v = torch.randn(len(ids), 1, 8)
        for form in ("plain", "cpu_attention", "block_attention"):
            y = operations[form].attention(q, k, v, masks[form][kind, paired])
            assert torch.allclose(y[:, 0], scores @ v[:, 0], atol=1e-5), form


@pytest.mark.parametrize("form", ["plain", "norm_rotate"])
@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
def test_small_rotary_tables_equal_the_expanded_ones(pairs, form):
    """Both rotate queries and keys of single and paired heads like complex numbers.

    The state is of the last stage, which has another softmax scale than the first.
    """
    torch.manual_seed(0)
    layers = gpt.LayerSpec("long"), gpt.LayerSpec(paired=True)
    shape = dict(num_layers=2, layers=layers, num_heads=4, model_dim=128)
    cfg = smoke_config(rotary_pairs=pairs, qk_norm="off", **shape)
    rt = make_runtime(dtype=torch.float64, fast=frozenset({form} - {"plain"}))
    state, model = gpt.Schedule(cfg).at(cfg.num_iterations), gpt.GPT(cfg, rt)
    assert state.rope["long"].softmax_scale != cfg.attention_scale[0]
    small, large = (
        gpt.make_step_inputs(state, 96, 48, dataclasses.replace(rt, use_compile=is_compiled), cfg)
        for is_compiled in (True, False)
    )
    qk = torch.randn(96, 2, 4, 32, dtype=torch.float64)  # (T, 2, H, K)
    seen = []  # q and k at the input of attention, of both layers for each kind of table
    model.ops = model.ops._replace(
        linear=lambda x, w: x if len(w) == 128 else torch.cat((qk.flatten(1), x), 1),  # output, or q, k and v
        attention=lambda q, k, v, mask: seen.append(torch.stack([x.reshape(96, 4, 32) for x in (q, k)], 1)) or q,
    )
    for step_inputs in (small, large):
        model.run_layers(torch.zeros(96, dtype=torch.int32), torch.zeros(96, dtype=torch.int32), step_inputs)
    positions, heads = torch.arange(96.0).double() % 48, torch.arange(4.0).double()
    for kind, turned, same, place in (
        (("long", False), seen[0], seen[2], positions[:, None] + 0 * heads),  # (T, H)
        (("short", True), seen[1], seen[3], 2 * positions[:, None] + heads % 2),
    ):
        tables, expanded = (step_inputs.ropes[kind] for step_inputs in (small, large))
        (frequencies, softmax_scale), parities = state.rope[kind[0]], 2 if kind[1] else 1
        assert all(table.shape == (96, parities, 8) for table in tables[:2])
        again = gpt.expand_rope(tables, 32, pairs)
        assert all(table.shape == (96, 2, 4 // parities, parities, 32) for table in expanded[:2])
        assert all(torch.allclose(a, b, rtol=0, atol=1e-15) for a, b in zip(again, expanded))
        assert torch.allclose(turned, same, rtol=0, atol=1e-14)
        angle = place[..., None] * torch.tensor(frequencies)  # (T, H, K/2)
        a, b = qk.chunk(2, -1) if pairs == "halves" else (qk[..., ::2], qk[..., 1::2])
        z = torch.complex(a, b) * torch.exp(-1j * angle)[:, None]
        parts = (z.real, z.imag)
        expected = torch.cat(parts, -1) if pairs == "halves" else torch.stack(parts, -1).flatten(-2)
        expected[:, 0] *= softmax_scale
        assert torch.allclose(turned, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("is_paired", [True, False])
def test_narrow_heads_of_short_layers_rotate_whole(is_compiled, is_paired):
    """short_qk_dim: each pair of channels rotates, with the frequencies and the softmax scale of short layers."""
    torch.manual_seed(0)
    layers = gpt.LayerSpec("long"), gpt.LayerSpec("short", paired=is_paired)
    cfg = smoke_config(num_layers=2, layers=layers, rotary_pairs="adjacent", short_qk_dim=16, attention_scale=(0.1, 0.3))
    rt = make_runtime(dtype=torch.float64, use_compile=is_compiled)
    rope = gpt.make_step_inputs(gpt.Schedule(cfg).at(0), 96, 48, rt, cfg).ropes["short", is_paired]
    rope = gpt.expand_rope(rope, 16, "adjacent") if is_compiled else rope
    parities = 2 if is_paired else 1
    x = torch.randn(96, 2, 2 // parities, parities, 16, dtype=torch.float64)
    ours = gpt.rotate(x, rope.cos, rope.sin, "adjacent")
    position = (torch.arange(96) % 48).double()[:, None] * parities + torch.arange(parities)  # (T, P)
    angle = position[..., None] * 1024.0 ** -torch.linspace(0, 1, 8, dtype=torch.float64)  # (T, P, K/2)
    z = torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.exp(-1j * angle)[:, None, None]
    expected = torch.view_as_real(z).flatten(-2) * torch.tensor([0.3, 1.0]).double().view(2, 1, 1, 1)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-7)  # 0.3 is rounded to float32
