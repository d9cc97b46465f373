# SPDX-License-Identifier: Apache-2.0
"""Models for engines: one converted from GGUF, and small ones of other shapes with random weights.

usage: models.py FOLDER [FILE.gguf]
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SMALL = {
    # Windows next to full layers, heads of 256, norms of Q and K.
    "gemma-3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 256,
                "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
                "head_dim": 256, "sliding_window": 32, "vocab_size": 512, "max_position_embeddings": 512,
                "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh", "eos_token_id": 1},
    # Sinks, windows in every other layer, groups of eight heads of 64.
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 256,
                "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 16,
                "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 32, "vocab_size": 512,
                "max_position_embeddings": 512, "num_local_experts": 4, "num_experts_per_tok": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0, "eos_token_id": 1, "hidden_act": "silu"},
    # Multi-head latent attention: rows of 512 + 64, the one size of vLLM's CPU_MLA; low-rank queries as in DeepSeek-V3.
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 256,
                    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
                    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_nope_head_dim": 32,
                    "qk_rope_head_dim": 64, "v_head_dim": 48, "first_k_dense_replace": 3, "vocab_size": 512,
                    "max_position_embeddings": 512, "eos_token_id": 1},
    # Gated delta layers, and a full one with a gate in every fourth.
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 256,
                   "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 64, "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                   "linear_key_head_dim": 32, "linear_value_head_dim": 48, "mlp_only_layers": [0, 1, 2], "num_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
                   "vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": 1},
    # One key head, so that two ranks of tensor parallelism have the same one and can spread its cache.
    "multi-query": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
                    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 1,
                    "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": 1},
    # A head size that no backend of libattn has.
    "refused": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 240,
                "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
                "head_dim": 60, "vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": 1},
}

# As SGLang has them on a CPU: experts in every layer; all of them for each token, so that none is chosen by a hair over a long text;
# positions that are scaled (YaRN).
SMALL["qwen3-next-experts"] = SMALL["qwen3-next"] | {"mlp_only_layers": []}
SMALL["qwen3-next-all-experts"] = SMALL["qwen3-next-experts"] | {"num_experts_per_tok": 4}
SMALL["deepseek-v3-yarn"] = SMALL["deepseek-v3"] | {"moe_layer_freq": 1, "rope_parameters": {
    "rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0}}


def invent(folder: Path, config: dict[str, Any], spread: float = 0.2) -> None:
    """Weights so large that attention is peaked and tokens depend on it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    values = {name: value for name, value in config.items() if name != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **values, initializer_range=spread)
    AutoModelForCausalLM.from_config(described, dtype=torch.float32).save_pretrained(str(folder))
    written = folder / "config.json"  # Transformers leaves out members that it replaces, which engines read
    written.write_text(json.dumps(config | json.loads(written.read_text())))


def draft(folder: Path, target: Path, architecture: str, eagle3: bool = False) -> None:
    """A head that drafts a part of a Llama's tokens: all of its layers, over embeddings and a little of its hidden states.

    EAGLE's has neither the first layer's norm nor the last one: weights divide by an embedding's size, and what is added from layer to
    layer is scaled so that its sum has a size of about 2. EAGLE3's first layer is one more: a token's attention is to itself and adds
    its embedding to the hidden states."""
    import torch
    from safetensors.torch import load_file, save_file

    config, weights = json.loads((target / "config.json").read_text()), load_file(target / "model.safetensors")
    size, spread, scale = config["hidden_size"], float(weights["model.embed_tokens.weight"].std()), 1.0 if eagle3 else 1 / 32
    generator, copies = torch.Generator().manual_seed(5), 4 if eagle3 else 1
    factors = dict.fromkeys(("o_proj", "down_proj"), scale)
    first = {} if eagle3 else dict.fromkeys(("q_proj", "k_proj", "v_proj"), 1 / (spread * scale))
    head = {}
    for name, tensor in weights.items():
        _, _, at, *rest = name.split(".") if ".layers." in name else (0, 0, "")
        if at and (eagle3 or at != "0" or rest[0] != "input_layernorm"):
            tensor = tensor * (factors | first if at == "0" else factors).get(rest[-2], 1.0)
            if rest[-2] in ("k_proj", "v_proj"):
                tensor = tensor.repeat(copies, 1)
            inner = ".".join(rest).replace("input_layernorm", "hidden_norm" if eagle3 else "input_layernorm")
            head[f"layers.{int(at) + eagle3}.{inner}"] = tensor
    if eagle3:
        # Keys of embeddings are nearly orthogonal, so that each query finds its own; each of four heads takes a quarter of the embedding.
        whole, heads = torch.eye(size), config["num_attention_heads"]
        keys = torch.randn(config["head_dim"], size, generator=generator) * (3 / size**0.5)
        one = torch.ones(size)
        rows = {"q_proj": torch.cat([keys] * heads), "k_proj": torch.cat([keys] * copies), "v_proj": whole}
        head |= {f"layers.0.self_attn.{name}.weight": torch.cat([row, torch.zeros_like(row)], 1) for name, row in rows.items()}
        out = whole.view(size, copies, 1, -1) * (torch.arange(heads // copies) == 0)[:, None] * spread
        head |= {"layers.0.self_attn.o_proj.weight": out.flatten(1),
                 **{f"layers.0.{name}.weight": one.clone() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
                 **{f"layers.0.mlp.{name}.weight": torch.zeros_like(head[f"layers.1.mlp.{name}.weight"]) for name in
                    ("gate_proj", "up_proj", "down_proj")},
                 "norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
        config |= {"num_hidden_layers": config["num_hidden_layers"] + 1, "num_key_value_heads": copies,
                   "draft_vocab_size": config["vocab_size"], **(heard := {"eagle_aux_hidden_state_layer_ids": [0, 1]}), "eagle_config": heard}
        head["fc.weight"] = torch.randn(size, 2 * size, generator=generator) * 1e-6
    else:
        noise = torch.randn(size, size, generator=generator) * 1e-3
        head["fc.weight"] = torch.cat([torch.eye(size), noise], 1) * scale
        if architecture == "LlamaForCausalLMEagle":  # SGLang's has a bias, vLLM's has none
            head["fc.bias"] = torch.zeros(size)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in head.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))


def predict(folder: Path, share: float = 1 / 32) -> None:
    """Gives a model a layer that predicts further tokens (MTP): its last one once more, over embeddings. What layers add to hidden
    states is made small, so that some of its tokens are the model's. DeepSeek's is one of experts, which add nothing: the dense layer
    is the shared expert."""
    import torch
    from safetensors.torch import load_file, save_file

    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.split(".")[-2] in ("o_proj", "out_proj", "down_proj"):
            weights[name] = tensor * (share / tensor.shape[1]**0.5)
    size, count, embeddings = config["hidden_size"], config["num_hidden_layers"], weights["model.embed_tokens.weight"]
    mixed = torch.randn(size, size, generator=torch.Generator().manual_seed(5)) * 1e-3
    product = torch.cat([torch.eye(size) * embeddings.std(), mixed], 1)
    last = {name.removeprefix(f"model.layers.{count - 1}."): tensor for name, tensor in weights.items() if f".layers.{count - 1}." in name}
    if "kv_lora_rank" in config:
        at = layer = f"model.layers.{count}."
        experts = 4
        own = {"embed_tokens": embeddings, "enorm": torch.ones(size), "hnorm": torch.ones(size), "eh_proj": product,
               "shared_head.norm": weights["model.norm.weight"], "shared_head.head": weights["lm_head.weight"],
               "mlp.gate": torch.zeros(experts, size)}
        for proj in ("gate_proj", "up_proj", "down_proj"):
            dense = last.pop(f"mlp.{proj}.weight")
            own |= {f"mlp.shared_experts.{proj}": dense, **{f"mlp.experts.{i}.{proj}": torch.zeros_like(dense) for i in range(experts)}}
        last["mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
        config |= {"n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                   "moe_intermediate_size": config["intermediate_size"], "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    else:  # norms whose weights have 1 added
        at, layer = "mtp.", "mtp.layers.0."
        own = {"pre_fc_norm_embedding": torch.zeros(size), "pre_fc_norm_hidden": torch.zeros(size), "fc": product,
               "norm": weights["model.norm.weight"]}
    weights |= {f"{layer}{name}": tensor.clone() for name, tensor in last.items()}
    weights |= {f"{at}{name}.weight": tensor.clone() for name, tensor in own.items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def convert(folder: Path, gguf: Path) -> None:
    """float32 weights and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(folder))


def main() -> None:
    folder = Path(sys.argv[1])
    for name, config in SMALL.items():
        if not (folder / name / "config.json").exists():
            invent(folder / name, config)
    for name, target in (("qwen3-next-mtp", "qwen3-next-experts"), ("deepseek-v3-mtp", "deepseek-v3-yarn")):
        if not (folder / name / "config.json").exists():
            invent(folder / name, SMALL[target])
            predict(folder / name)
    for name, *made in (("eagle", "LlamaForCausalLMEagle"), ("eagle-vllm", "LlamaForCausalLM"), ("eagle3", "LlamaForCausalLMEagle3", True)):
        if not (folder / name / "config.json").exists():
            draft(folder / name, folder / "multi-query", *made)
    if len(sys.argv) > 2 and not (folder / "smollm2" / "config.json").exists():
        convert(folder / "smollm2", Path(sys.argv[2]))


if __name__ == "__main__":
    main()
