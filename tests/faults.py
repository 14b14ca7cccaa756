"""Plausible mistakes in the model, as source edits, each with the situation and the tests that must show it.

What only scales the output of the gated delta rule (the factor dk^-0.5 of q, a factor on v) is not among them: the
output norm takes it away again, so that no logit can show it; the tests of the operation do.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.fault_situations import Situation, alone, cut, idle_row, image, ragged, reused_slot


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which occurs exactly once in `file`, by `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """`tests`: node ids of which at least one must fail; `situation`, on `fixture`: where the logits must move."""

    name: str
    broken: str
    edits: tuple[Edit, ...]
    fixture: str
    situation: Situation
    tests: tuple[str, ...]


MODEL, STATE = "modeling/model.py", "modeling/state.py"
DELTA, CONVOLUTION = "modeling/ops/gated_delta.py", "modeling/ops/convolution.py"
SCAN = "modeling/ops/chunk_scan.py"
ATTENTION, EXPERTS = "modeling/ops/attention.py", "modeling/ops/experts.py"
NORMS, ROTARY = "modeling/ops/normalization.py", "modeling/ops/rotary.py"
GDN_LAYER, ATTENTION_LAYER = "modeling/layers/gated_delta_net.py", "modeling/layers/attention.py"
MLP_LAYER, RECIPES = "modeling/layers/mlp.py", "modeling/weights/recipes.py"

PARITY = "tests/modeling/test_parity.py::"
LAYOUTS = "tests/modeling/weights/test_hf_layouts.py::test_every_parameter_is_what_hf_computes_with"


def one_row_test(fixture: str, length: int) -> str:
    return f"{PARITY}test_one_row_without_padding[{fixture}-{length}]"


def ragged_test(fixture: str, group: int = 0) -> str:
    return f"{PARITY}test_ragged_batch_then_decode[{fixture}-lengths{group}-right]"


def cut_test(fixture: str, prefix: int = 65) -> str:
    return f"{PARITY}test_prompt_cut_anywhere[{fixture}-{prefix}]"


def joins_test(fixture: str) -> str:
    return f"{PARITY}test_joins_and_leaves[{fixture}]"


# In the gated delta rule: padded positions keep their q, k and v.
UNMASKED_QKV = Edit(
    DELTA,
    "q, k, v = (_select(x, valid[..., None, None]) for x in (query, key, value))",
    "q, k, v = (x.to(torch.float32) for x in (query, key, value))",
)

FAULTS = (
    Fault(
        "padding mask",
        "padded positions run through the gated delta rule like tokens",
        (Edit(DELTA, "return torch.where(valid, x, 0.0).to(torch.float32)", "return x.to(torch.float32)"),),
        "qwen3_next",
        ragged,
        (ragged_test("qwen3_next"),),
    ),
    Fault(
        "beta mask",
        "padding: the decay is masked, beta with k and v is not, so padding is written into the state",
        (UNMASKED_QKV, Edit(DELTA, "_select(beta, valid[..., None])\n", "beta\n")),
        "qwen3_5",
        ragged,
        (ragged_test("qwen3_5"),),
    ),
    Fault(
        "decay mask",
        "padding: beta is masked, the decay is not, so the state fades over the padding",
        (Edit(DELTA, "_select(log_decay, valid[..., None])", "log_decay"),),
        "qwen3_5_moe",
        ragged,
        (ragged_test("qwen3_5_moe"),),
    ),
    Fault(
        "conv tail",
        "the conv state is taken at the end of the bucket, not at the last valid token",
        (
            Edit(
                CONVOLUTION,
                "index = lengths[:, None] + torch",
                "index = torch.full_like(lengths, window.shape[1] - kernel + 1)[:, None] + torch",
            ),
        ),
        "qwen3_next",
        ragged,
        (ragged_test("qwen3_next"), "tests/modeling/ops/test_convolution.py::test_ragged_rows"),
    ),
    Fault(
        "conv zeros",
        "the conv state of a prompt shorter than the kernel repeats its first token instead of zeros",
        (
            Edit(
                CONVOLUTION,
                "lengths[:, None] + torch.arange(kernel - 1, device=window.device)",
                "(lengths[:, None] + torch.arange(kernel - 1, device=window.device)).clamp(min=kernel - 1)",
            ),
        ),
        "qwen3_5_tied",
        ragged,
        (ragged_test("qwen3_5_tied"),),
    ),
    Fault(
        "conv order",
        "the channels of the convolution are split in the order k, q, v",
        (
            Edit(
                RECIPES,
                "_split(conv, rows), *per_head]",
                "_split(conv, dict(sorted(rows.items()))), *per_head]",
            ),
        ),
        "qwen3_5",
        alone,
        (one_row_test("qwen3_5", 5), f"{LAYOUTS}[qwen3_5-]"),
    ),
    Fault(
        "grouped projections",
        "the fused q, k, v, z of Qwen3-Next are cut flat, not by key head",
        (
            Edit(
                RECIPES,
                'projection("in_proj_qkvz", "qkvz", heads)',
                'projection("in_proj_qkvz", "qkvz")',
            ),
        ),
        "qwen3_next",
        alone,
        (one_row_test("qwen3_next", 1), f"{LAYOUTS}[qwen3_next-]"),
    ),
    Fault(
        "head mapping",
        "value head j reads key head j % Hk instead of j // r",
        (
            Edit(
                DELTA,
                "heads, 1, dim).expand(-1, -1, repeats, -1)",
                "1, heads, dim).expand(-1, repeats, -1, -1)",
            ),
        ),
        "qwen3_5",
        alone,
        (one_row_test("qwen3_5", 5),),
    ),
    Fault(
        "kv head mapping",
        "query head j reads KV head j % Hkv instead of j // groups",
        (
            Edit(
                ATTENTION,
                "query.reshape(rows * kv_heads, groups * tokens, dim), key.reshape(-1, length, dim).transpose(1, 2)",
                "query.reshape(-1, tokens, dim), key.repeat(1, groups, 1, 1).reshape(-1, length, dim).transpose(1, 2)",
            ),
            Edit(
                ATTENTION,
                "weights.reshape(rows * kv_heads, groups * tokens, length), value.reshape(-1, length, dim)",
                "weights.reshape(-1, tokens, length), value.repeat(1, groups, 1, 1).reshape(-1, length, dim)",
            ),
        ),
        "qwen3_next",
        alone,
        (one_row_test("qwen3_next", 5),),
    ),
    Fault(
        "gate split",
        "q_proj is cut into all queries, then all gates, not per head",
        (
            Edit(
                ATTENTION_LAYER,
                "query_and_gate = self.q_proj(x).reshape(rows, tokens, -1, 2 * self.head_dim)",
                "query_and_gate = torch.cat(self.q_proj(x).reshape(rows, tokens, 2, -1, self.head_dim).unbind(2), -1)",
            ),
        ),
        "qwen3_5_wide",
        alone,
        (one_row_test("qwen3_5_wide", 5),),
    ),
    Fault(
        "+1 norm",
        "the norms of blocks, queries and keys multiply by w, not by 1 + w",
        (Edit(NORMS, "(1.0 + weight.to(torch.float32))", "weight.to(torch.float32)"),),
        "qwen3_next_mixed",
        alone,
        (one_row_test("qwen3_next_mixed", 1), "tests/modeling/ops/test_normalization.py::test_zero_centered"),
    ),
    Fault(
        "gated norm",
        "the GDN output norm is gated by sigmoid(z), not by silu(z)",
        (Edit(NORMS, "functional.silu(gate", "torch.sigmoid(gate"),),
        "qwen3_5_moe_tied",
        alone,
        (one_row_test("qwen3_5_moe_tied", 1),),
    ),
    Fault(
        "decay sign",
        "the log decay is positive: the state grows",
        (Edit(GDN_LAYER, "log_decay = -torch.exp", "log_decay = torch.exp"),),
        "qwen3_next",
        alone,
        (one_row_test("qwen3_next", 2), one_row_test("qwen3_next", 65)),
    ),
    Fault(
        "decay without dt_bias",
        "softplus(a) in place of softplus(a + dt_bias)",
        (Edit(GDN_LAYER, ".to(torch.float32) + self.dt_bias.weight", ".to(torch.float32)"),),
        "qwen3_5",
        alone,
        (one_row_test("qwen3_5", 65),),
    ),
    Fault(
        "state dtype",
        "the recurrent state is kept in bfloat16",
        (
            Edit(STATE, "(key_dim, value_dim), torch.float32)", "(key_dim, value_dim), torch.bfloat16)"),
            Edit(STATE, "(_over_rows(start > 0, rows), rows, 0.0)", "(_over_rows(start > 0, rows), rows.float(), 0.0)"),
            Edit(
                STATE,
                "return torch.where(_over_rows(active.logical_not(), state), state, rows)",
                "return torch.where(_over_rows(active.logical_not(), state), state, rows.to(state.dtype))",
            ),
            Edit(STATE, "state, rows.index_select(0, row))", "state, rows.index_select(0, row).to(state.dtype))"),
        ),
        "qwen3_5",
        alone,
        (ragged_test("qwen3_5"), "tests/modeling/test_state.py::test_description"),
    ),
    Fault(
        "chunk boundary: decay",
        "the state is carried over a chunk without that chunk's decay",
        (Edit(SCAN, "state = from_start[:, -1:] * state + ", "state = state + "),),
        "qwen3_5",
        alone,
        (one_row_test("qwen3_5", 129), ragged_test("qwen3_5")),
    ),
    Fault(
        "chunk boundary: decay twice",
        "the chunk's decay is applied twice to the carried state",
        (Edit(SCAN, "from_start[:, -1:] * state", "from_start[:, -1:] ** 2 * state"),),
        "qwen3_5_tied",
        alone,
        (one_row_test("qwen3_5_tied", 129), ragged_test("qwen3_5_tied")),
    ),
    Fault(
        "chunk boundary: restart",
        "the outputs of every chunk but the first leave out the state before it",
        (
            Edit(
                SCAN,
                "from_start * torch.bmm(query, state) + ",
                "(from_start * torch.bmm(query, state) if n == 0 else 0.0) + ",
            ),
        ),
        "qwen3_5_moe",
        alone,
        (one_row_test("qwen3_5_moe", 65),),
    ),
    Fault(
        "continuation: delta",
        "a chunk's writes do not take away what the incoming state recalls",
        (Edit(SCAN, "writes = written - torch.bmm(erased, state)", "writes = written"),),
        "qwen3_next",
        cut,
        (cut_test("qwen3_next"),),
    ),
    Fault(
        "continuation: positions",
        "the rotary positions of a continued prompt start at zero again",
        (Edit(MODEL, "position = start[:, None] + valid", "position = valid"),),
        "qwen3_5",
        cut,
        (cut_test("qwen3_5"),),
    ),
    Fault(
        "alias swap",
        "the recurrent states of the first two layers come back in each other's place",
        (
            Edit(
                MODEL,
                "        return x, states\n",
                "        return x, [[new[2], new[1], new[0], *new[3:]] for new in states]\n",
            ),
        ),
        "qwen3_next",
        cut,
        (cut_test("qwen3_next"), joins_test("qwen3_next")),
    ),
    Fault(
        "alias swap: key and value",
        "keys come back as values and values as keys",
        (Edit(ATTENTION_LAYER, "[(key_cache, value_cache)]", "[(value_cache, key_cache)]"),),
        "qwen3_5_bias",
        cut,
        (cut_test("qwen3_5_bias"),),
    ),
    Fault(
        "fresh slot",
        "a new request starts from what the last one left in its slot",
        (Edit(STATE, "return torch.where(_over_rows(start > 0, rows), rows, 0.0)", "return rows"),),
        "qwen3_5",
        reused_slot,
        (joins_test("qwen3_5"), "tests/modeling/test_state.py::test_a_slot_is_used_again"),
    ),
    Fault(
        "idle row",
        "an idle row writes the slot that it names",
        (Edit(STATE, "named = torch.where(active, slots, -1)", "named = slots"),),
        "qwen3_5_moe",
        idle_row,
        ("tests/modeling/test_state.py::test_an_idle_row_writes_nowhere",),
    ),
    Fault(
        "cache offset",
        "keys and values are written one place too far",
        (Edit(ATTENTION, "- start[:, None]  # [B, L]", "- start[:, None] - 1"),),
        "qwen3_5_tied",
        alone,
        (one_row_test("qwen3_5_tied", 5), joins_test("qwen3_5_tied")),
    ),
    Fault(
        "causal mask",
        "a token attends to the one behind it",
        (Edit(ATTENTION, "<= token_position[:, :, None]", "<= 1 + token_position[:, :, None]"),),
        "qwen3_next",
        ragged,
        (one_row_test("qwen3_next", 5),),
    ),
    Fault(
        "rope pairs",
        "neighbouring dimensions are rotated as pairs instead of the two halves",
        (
            Edit(ROTARY, "first = x[..., :half]", "first = x[..., : 2 * half : 2]"),
            Edit(ROTARY, "second = x[..., half : 2 * half]", "second = x[..., 1 : 2 * half : 2]"),
        ),
        "qwen3_5_wide",
        alone,
        (one_row_test("qwen3_5_wide", 65), "tests/modeling/ops/test_rotary.py::test_text"),
    ),
    Fault(
        "mrope sections",
        "the sections of time, height and width stand one behind the other, not interleaved",
        (
            Edit(
                ROTARY,
                "chosen = torch.where(turn == axis, index, count) < min(count, 3 * mrope_section[axis])",
                "chosen = (index >= sum(mrope_section[:axis])) & (index < sum(mrope_section[: axis + 1]))",
            ),
        ),
        "qwen3_5",
        image,
        ("tests/modeling/test_positions.py::test_position_and_cache_slot_differ[qwen3_5]",),
    ),
    Fault(
        "top-k renormalisation",
        "the weights of the chosen experts are not renormalised",
        (Edit(EXPERTS, "if renormalize:", "if False:"),),
        "qwen3_5_moe",
        alone,
        (one_row_test("qwen3_5_moe", 1),),
    ),
    Fault(
        "expert blocks",
        "the last block of an expert is given to the next one",
        (Edit(EXPERTS, "(block_begin + block_counts) <= block", "(block_begin + block_counts - 1) <= block"),),
        "qwen3_next",
        alone,
        (one_row_test("qwen3_next", 65), "tests/modeling/ops/test_experts.py::test_skewed_routing"),
    ),
    Fault(
        "shared expert gate",
        "the shared expert is added without its gate",
        (
            Edit(
                MLP_LAYER,
                "self.shared_expert_gate(tokens) * self.shared_expert.partial(tokens)",
                "self.shared_expert.partial(tokens)",
            ),
        ),
        "qwen3_5_moe_tied",
        alone,
        (one_row_test("qwen3_5_moe_tied", 1),),
    ),
)
