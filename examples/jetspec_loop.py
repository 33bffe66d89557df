"""JetSpec's decoding loop on pagedtree, for batches, greedy and sampled: python examples/jetspec_loop.py

JetSpec, on the PYTHONPATH, has the model stack and the drafters; pagedtree has trees, slots, attention, verification,
commit and compaction, on the device. The host reads one small tensor a round. Prints the number of greedy texts equal
to JetSpec's, and of sampled texts equal to plain sampling.
"""

from types import SimpleNamespace

import torch
from jetspec.core.llm import SamplingParams
from jetspec.core.model_runner import ModelRunner
from jetspec.draft import RandomTreeDrafter, TargetEchoTreeDrafter
from jetspec.inference_engine import paged_tree_attn as kernel
from jetspec.inference_engine.compiled_verify_stack import CompiledVerifyStack
from jetspec.inference_engine.engine import JetSpecEngine
from transformers import Qwen3Config, Qwen3ForCausalLM

import pagedtree as pt
from pagedtree.integrations.transformers import PagedCache


class Loop:
    def __init__(self, model, num_pages=64, page_size=16):
        self.model, self.page_size = model, page_size
        self.stack = CompiledVerifyStack(model, block_size=page_size)
        self.cache = PagedCache(num_pages, page_size, next(model.parameters()).device)
        heads, kv_heads, head_dim = self.stack.num_heads_q, self.stack.num_heads_kv, self.stack.head_dim
        self.heads = {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
        row = torch.zeros(1, kv_heads, head_dim, dtype=model.dtype, device=self.cache.device)
        self.pools = [
            *zip(*(self.cache.layer(i, row, row) for i in range(model.config.num_hidden_layers)), strict=True)
        ]

    def logits(self, tokens, table, positions, seq_lens, cu, slots, mask=None):
        """Returns logits [T, V] of a pass over tokens [T] of all sequences."""
        longest, layers = -(-len(tokens) // len(seq_lens)), len(self.pools[0])
        plan = pt.attention_plan(seq_lens, cu, **self.heads, page_size=self.page_size, max_seqlen_q=longest)
        attend = pt.PreparedAttention(table, seq_lens, cu, mask, max_seqlen_q=longest, plan=plan)
        kernel.paged_tree_attn = lambda q, k_pool, v_pool, *rest: attend(q, k_pool, v_pool)
        cos, sin = self.model.model.rotary_emb(self.model.lm_head.weight[:1, :1], positions[None])
        places = [slots // self.page_size] * layers, [slots % self.page_size] * layers  # JetSpec's scatter: none is -1
        tables = [table] * layers
        return self.stack._stack(tokens[None], cos, sin, *self.pools, tables, cu, seq_lens, mask, *places)[0]

    def prefill(self, tokens, table):
        """Reads all tokens but the last, the root of the first tree."""
        length = len(tokens) - 1
        seq_lens, cu = torch.tensor([length], dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)
        slots = pt.slot_mapping(table, seq_lens, cu, self.page_size, total_q=length)
        self.logits(tokens[:-1], table, torch.arange(length), seq_lens, cu, slots)

    @torch.inference_mode()
    def generate(self, prompts, drafter, depth, width, budget, new_tokens, params=None, seeds=None):
        live, total = list(range(len(prompts))), max(map(len, prompts)) + new_tokens
        history = torch.full((len(prompts), total), -1)
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        left = torch.full((len(prompts),), new_tokens, dtype=torch.int32)
        for b, prompt in enumerate(prompts):
            history[b, : len(prompt)] = prompt
            assert self.cache.reserve(b, len(prompt) + new_tokens + budget)
            self.prefill(prompt, self.cache.page_table([b]))
        while live:
            rows, table = torch.tensor(live), self.cache.page_table(live)
            start = lengths[rows] - 1
            known = [history[b : b + 1, : int(lengths[b])] for b in live]  # JetSpec's drafters read one text
            best = torch.cat([drafter.propose_logits(text, depth) for text in known]).log_softmax(-1).topk(width)
            roots = history[rows].gather(1, start[:, None].long())[:, 0]
            tokens, trees = pt.best_first_tree(best.values.float(), best.indices, roots, budget)
            steps = pt.prepare_step(trees, table, start, self.page_size, total_q=len(tokens))
            logits = self.logits(tokens.long(), table, *steps, trees.mask)
            if params is None:
                verdict = pt.verify_greedy(logits, tokens, trees)
            else:
                verdict = pt.verify_sampled(logits, tokens, trees, params, seeds=seeds[rows], positions=start.long())
            texts = {"history": history, "history_lens": lengths, "history_rows": rows.int()}
            committed = pt.commit(verdict, trees, start, **texts, tokens_left=left[rows])
            left[rows] -= committed.num_tokens
            self.cache.compact(table, start, verdict.accept_index, committed.num_accepted)
            live = [b for b, is_finished in zip(live, committed.finished.tolist(), strict=True) if not is_finished]
        for b in range(len(prompts)):
            self.cache.release(b)
        return [history[b, len(prompt) : len(prompt) + new_tokens].tolist() for b, prompt in enumerate(prompts)]


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=256, initializer_range=0.3)).eval()
    engine = object.__new__(JetSpecEngine)
    engine.model, engine.runner, engine.eos_token_ids = model, ModelRunner(model), set()
    engine.device, engine.dtype, engine.block_size, engine.attn_backend = "cpu", torch.float32, 16, "sdpa"
    engine.tokenizer = SimpleNamespace(decode=lambda ids, **options: "")
    prompts = [torch.randint(128, (n,)) for n in (8, 5, 12, 3, 33)]
    params, seeds = pt.SamplingParams(temperature=0.8, top_p=0.95), torch.arange(5)
    plain = [
        Loop(model).generate([prompt], RandomTreeDrafter(128), 1, 1, 1, 24, params, seeds[b : b + 1])[0]
        for b, prompt in enumerate(prompts)
    ]
    for drafter in (RandomTreeDrafter(128), TargetEchoTreeDrafter(model)):
        model.config._attn_implementation, name = "sdpa", type(drafter).__name__
        shape = {"block_size": 4, "tree_width": 2, "budget": 15, "sampling_params": SamplingParams(0.0, 24)}
        theirs = [
            text["token_ids"] for text in engine.generate_tree_batch([p[None] for p in prompts], drafter, **shape)
        ]
        greedy = Loop(model).generate(prompts, drafter, 3, 2, 15, 24)
        sampled = Loop(model).generate(prompts, drafter, 3, 2, 15, 24, params, seeds)
        for texts, expected, whose in ((greedy, theirs, "JetSpec's"), (sampled, plain, "plain sampling's")):
            print(name, sum(a == b for a, b in zip(texts, expected, strict=True)), "of 5 texts equal", whose)


if __name__ == "__main__":
    main()
