"""Attention: masks, the plain form and both fast forms. RoPE."""

import pytest
import torch
from conftest import gpt, smoke_config

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("eager_flex")
# T, window, mean length of a document
CASES = [(256, 1, 40), (256, 64, 17), (384, 100, 90), (512, 128, 1000), (640, 639, 200)]
FORMS = {name: gpt.make_operations(smoke_config(), {name}, torch.float64)
         for name in ("plain", "block_attention", "flex_attention")}  # fmt: skip


def make_doc_ids(num_tokens: int, mean_length: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.rand(num_tokens) < 1 / mean_length).cumsum(0).int()


def brute_force_mask(doc_ids: torch.Tensor, window: int) -> torch.Tensor:
    """(T, T) from the definition, pair by pair."""
    ids, places = doc_ids.tolist(), range(len(doc_ids))
    return torch.tensor([[j <= i and i - j <= window and ids[i] == ids[j] for j in places] for i in places])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens, window, mean_length", CASES)
def test_attention_and_its_gradients_equal_the_definition(num_tokens, window, mean_length, form, num_rows):
    """Of one packed sequence and of two. Blocks have 64 queries, or 128 with windows from 512 on. All of them read as
    many blocks of keys as the one that sees furthest."""
    row_len = num_tokens // num_rows
    doc_ids = make_doc_ids(num_tokens, mean_length) + torch.arange(num_tokens).int() // row_len
    mask = brute_force_mask(doc_ids, window)
    ours = [torch.randn(num_tokens, 2, K, dtype=torch.float64, requires_grad=True) for K in (16, 16, 24)]
    naive = [x.detach().clone().requires_grad_() for x in ours]
    made = FORMS[form].make_mask(doc_ids, torch.tensor(window))
    if form == "plain":
        assert torch.equal(made, mask)
    elif form == "block_attention":
        size = 128 if window >= 512 else 64
        first = mask.int().argmax(1).view(-1, size).amin(1)  # first visible key of each block
        num_keys = int((torch.arange(size, num_tokens + 1, size) - first // size * size).max())
        assert made.shape == (num_tokens // size, size, num_keys)
    y = FORMS[form].attention(*ours, made)
    q, k, v = naive
    scores = torch.einsum("qhk,shk->hqs", q, k).masked_fill(~mask, -torch.inf)
    expected = torch.einsum("hqs,shk->qhk", scores.softmax(-1), v)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.allclose(y, expected, atol=1e-12)
    for a, b in zip(ours, naive):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)


@pytest.mark.parametrize("num_tokens, window, mean_length", CASES)
def test_block_mask_covers_exactly_the_visible_blocks(num_tokens, window, mean_length):
    doc_ids = make_doc_ids(num_tokens, mean_length)
    mask = brute_force_mask(doc_ids, window)
    blocks = mask.view(num_tokens // 128, 128, num_tokens // 128, 128).transpose(1, 2).flatten(2)
    made = gpt.build_block_mask(doc_ids, torch.tensor(window))
    listed, full = torch.zeros(2, *blocks.shape[:2], dtype=torch.bool)
    of_rows = (made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices)
    for out, (counts, indices) in zip((listed, full), of_rows):
        for row in range(len(out)):
            out[row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    assert not (listed & full).any()
    assert torch.equal(full, blocks.all(-1))  # skips the mask function: must be visible throughout
    assert not (blocks.any(-1) & ~(listed | full)).any()  # nothing visible is left out
    # at most one empty block per row is visited in vain
    assert (listed & ~blocks.any(-1)).sum() <= len(listed)
    of_columns = (made.q_num_blocks, made.q_indices), (made.full_q_num_blocks, made.full_q_indices)
    for seen, (counts, indices) in zip((listed, full), of_columns):  # backward reads the lists by key block
        for column in range(len(seen)):
            rows = indices[0, 0, column, : counts[0, 0, column]].long()
            assert rows.tolist() == seen[:, column].nonzero().flatten().tolist()


@pytest.mark.parametrize("kind, is_paired, key_offset, qk_norm", [
    ("long", False, False, "on"), ("long", False, True, "off"), ("long", True, True, "off"),
    ("short", False, False, "on"), ("short", True, False, "off"), ("short", False, True, "on")])  # fmt: skip
def test_queries_and_keys_rotate_like_complex_numbers(kind, is_paired, key_offset, qk_norm):
    """In the last stage, float64 except the tables. Half of the pairs of long layers rotate, and all of short layers.
    With the key offset the other channels of a key come from the previous token, but not into another sequence."""
    torch.manual_seed(0)
    layers = gpt.LayerSpec("long"), gpt.LayerSpec(kind, paired=is_paired, key_offset=key_offset)
    options = dict(num_heads=4, model_dim=128, short_qk_dim=16, attention_scale=(0.1, 0.3), qk_norm=qk_norm)
    cfg = smoke_config(num_layers=2, layers=layers, **options)
    state, heads = gpt.Schedule(cfg).at(cfg.num_iterations), gpt.Attention(cfg, layers[1]).heads
    (frequencies, softmax_scale), (H, K, L, P, *_) = state.rope[kind], heads
    assert softmax_scale != cfg.attention_scale[0] and (L, P) == (32, 1 + is_paired)
    assert (K, len(frequencies), (frequencies == 0).sum()) == ((32, 16, 8) if kind == "long" else (16, 8, 0))
    step_inputs = gpt.make_step_inputs(state, 96, 48, cfg, CPU)
    rope = step_inputs.ropes[kind, is_paired]

    position = (torch.arange(96) % 48).double()[:, None] * P + torch.arange(P)  # (T, P)
    angle = position[..., None] * torch.tensor(frequencies)  # (T, P, K/2)
    assert torch.equal(rope.cos, angle.cos().float()) and torch.equal(rope.sin, angle.sin().float())
    assert rope.num_rotating == (frequencies > 0).sum()
    turn = torch.complex(rope.cos, -rope.sin).to(torch.complex128)  # (T, P, K/2)

    x, weight = torch.randn(96, 128).double(), torch.randn(H * (2 * K + L), 128).double() / 11
    qk = (x @ weight[: 2 * H * K].T).view(96, 2, H, K)
    if qk_norm == "on":
        qk = qk / (qk.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    z = torch.complex(*qk.chunk(2, -1)) * turn[:, torch.arange(H) % P][:, None]  # head h has position h % P
    q, k = torch.cat((z.real, z.imag), -1).unbind(1)
    if key_offset:
        moved = (torch.tensor(frequencies) == 0).repeat(2)
        before = torch.where((torch.arange(96) % 48 == 0)[:, None, None], k, k.roll(1, 0))
        k = torch.where(moved, before, k)
    ours = gpt.make_qkv(x, weight, rope, heads, step_inputs, gpt.Operations(torch.float64))
    expected = q * rope.softmax_scale.double(), k, x @ weight[2 * H * K :].T
    assert rope.softmax_scale.item() == pytest.approx(softmax_scale, rel=1e-7)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == torch.float64 and torch.allclose(one, other, rtol=0, atol=1e-13)
